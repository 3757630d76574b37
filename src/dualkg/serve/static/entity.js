// Entity: explanations in place.

import { openExplanationsInPlace } from "./explanation.js";

openExplanationsInPlace();
