// Entity: reasons in place, and completion for the name of another. The drawing is walked by its links.

import { combobox, entityAddress, findEntities } from "./common.js";
import { openReasonsInPlace } from "./reasons.js";

const field = document.querySelector("[data-lookup]").elements.name;
combobox(field, { find: findEntities(), onPick: (thing) => location.assign(entityAddress(thing.name)) });
openReasonsInPlace();
