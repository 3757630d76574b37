// Entity: decisions, and explanations in place.

import "./decide.js";
import { openExplanationsInPlace } from "./explanation.js";

openExplanationsInPlace();
