// The console begins here: its frame with its pages.
import { open } from "./frame.js";
import { views } from "./views.js";

open(views);
