// The pages of the console by their names; each fills an element with what the admin API answers.
import { bucket } from "./bucket.js";
import { clients } from "./clients.js";
import { groups } from "./groups.js";
import { letters } from "./letters.js";
import { overview } from "./overview.js";
import { topics } from "./topics.js";
import { users } from "./users.js";

export const views = { overview, topics, dead: letters, groups, clients, users, bucket };
