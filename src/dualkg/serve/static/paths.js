// Paths between two entities: completion while typing, explanations in place, decisions.

import { combobox, findEntities, nameIn } from "./common.js";
import "./decide.js";
import { openExplanationsInPlace } from "./explanation.js";

const form = document.querySelector("[data-paths]");
const fields = [form.elements.start, form.elements.end];

for (const field of fields) {
  combobox(field, {
    find: findEntities(),
    onPick: () => {
      const empty = fields.find((other) => !nameIn(other));
      if (empty) empty.focus();
      else form.requestSubmit();
    },
  });
}
// Two entities may have the same label: the name is sent.
form.addEventListener("formdata", (event) => {
  for (const field of fields) event.formData.set(field.name, nameIn(field));
});
openExplanationsInPlace();
