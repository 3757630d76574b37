// Entity: decisions, explanations in place, and a walk over the neighbours.

import "./decide.js";
import { openExplanationsInPlace } from "./explanation.js";
import { startWalk } from "./walk.js";

openExplanationsInPlace();
startWalk();
