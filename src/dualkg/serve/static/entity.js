// Entity: explanations in place, and completion for the name of another entity.

import { combobox, entityAddress, findEntities } from "./common.js";
import { openExplanationsInPlace } from "./explanation.js";

const field = document.querySelector("[data-lookup]").elements.name;
const open = (item) => location.assign(entityAddress(item.name));
combobox(field, { find: findEntities(), onPick: open });
openExplanationsInPlace();
