// The pages of the console by name. Each fills an element from responses of the admin API.
import { bucket } from "./bucket.js";
import { clients } from "./clients.js";
import { groups } from "./groups.js";
import { letters } from "./letters.js";
import { links } from "./links.js";
import { overview } from "./overview.js";
import { queues } from "./queues.js";
import { quotas } from "./quotas.js";
import { sql } from "./sql.js";
import { topics } from "./topics.js";
import { users } from "./users.js";

export const views = { overview, topics, dead: letters, groups, queues, links, clients, users, quotas, bucket, sql };
