// The query page: completion while typing, explanations in place. The form and the predictions work
// without it.

import { address, combobox, findAmong, findEntities, nameIn, offeredRelations } from "./common.js";
import "./decide.js";
import { openExplanationsInPlace } from "./explanation.js";

const form = document.querySelector("[data-query]");
const { head, relation: relationField, tail } = form.elements;
const field = { head, relation: relationField, tail };
const wanted = () => form.elements.find.value;
const given = () => Object.keys(field).filter((part) => part !== wanted());

/** The name in a field; a relation can also be typed as it is displayed. */
function givenName(part) {
  const name = nameIn(field[part]);
  if (part !== "relation" || field[part].dataset.name !== undefined) return name;
  const isTyped = (offered) => offered.text.toLowerCase() === name.toLowerCase();
  return relations.find(isTyped)?.name ?? name;
}

function next() {
  const empty = given().find((part) => !nameIn(field[part]));
  if (!empty) {
    form.requestSubmit();
    return;
  }
  field[empty].focus();
  if (empty === "relation") relation.open();
}

const relations = offeredRelations(form);
combobox(field.head, { find: findEntities(), onPick: next });
combobox(field.tail, { find: findEntities(), onPick: next });
const relation = combobox(field.relation, { find: findAmong(relations), onPick: next, wait: 0 });
// Without scripts the field has the relation's name, which can be sent; with them it shows the
// displayed text.
if (field.relation.dataset.name !== undefined) {
  field.relation.defaultValue = field.relation.dataset.text;
}
// All relations are listed before a letter is typed.
field.relation.addEventListener("click", () => {
  if (!field.relation.value) relation.open();
});

let before = wanted();
form.addEventListener("change", (event) => {
  if (event.target.name !== "find") return;
  // The part to find now was given before: it moves to the empty field.
  const from = field[wanted()];
  const to = field[before];
  const areEntities = from !== field.relation && to !== field.relation;
  if (areEntities && !to.value) {
    to.value = from.value;
    if (from.dataset.name !== undefined) to.dataset.name = from.dataset.name;
  }
  from.value = "";
  delete from.dataset.name;
  before = wanted();
});

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const empty = given().find((part) => !nameIn(field[part]));
  if (empty) {
    field[empty].focus();
    return;
  }
  const params = { find: wanted() };
  for (const part of given()) params[part] = givenName(part);
  location.assign(address("/", params));
});

// A page restored by the browser shows the query of its address again.
const names = {};
for (const part of Object.keys(field)) names[part] = field[part].dataset.name;
addEventListener("pageshow", (event) => {
  if (!event.persisted) return;
  form.reset();
  before = wanted();
  for (const [part, name] of Object.entries(names)) {
    if (name !== undefined) field[part].dataset.name = name;
  }
});

// Without predictions to read, typing comes next; but no keyboard should cover the page of a phone.
if (matchMedia("(pointer: fine)").matches && !document.querySelector(".answers, .problem")) {
  const first = given().find((part) => !field[part].value) ?? "head";
  field[first].focus({ preventScroll: true });
}
openExplanationsInPlace();
