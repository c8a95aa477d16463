// Entry point of the console.
import { open } from "./frame.js";
import { views } from "./views.js";

open(views);
