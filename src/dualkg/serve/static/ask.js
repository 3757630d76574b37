// Ask: completion as one types, reasons in place. The form and the answers work without it.

import { address, combobox, findAmong, findEntities, meant, spoken } from "./common.js";
import { openReasonsInPlace } from "./reasons.js";

const form = document.querySelector("[data-question]");
const field = Object.fromEntries(["head", "relation", "tail"].map((part) => [part, form.elements[part]]));
const wanted = () => form.elements.find.value;
const given = () => Object.keys(field).filter((part) => part !== wanted());

/** The name that a field means; a relation can be typed as people say it. */
function named(part) {
  const name = meant(field[part]);
  if (part !== "relation" || field[part].dataset.name !== undefined) return name;
  return relations.find((one) => one.label.toLowerCase() === name.toLowerCase())?.name ?? name;
}

function next() {
  const empty = given().find((part) => !meant(field[part]));
  if (!empty) form.requestSubmit();
  else {
    field[empty].focus();
    if (empty === "relation") relation.open();
  }
}

const relations = [...form.querySelectorAll("#relations option")].map((option) => {
  const said = spoken(option.label || option.value);
  return { name: option.value, label: said, said, note: null };
});
combobox(field.head, { find: findEntities(), onPick: next });
combobox(field.tail, { find: findEntities(), onPick: next });
const relation = combobox(field.relation, { find: findAmong(relations), onPick: next, wait: 0 });
// Without scripts the field has the relation's name, which can be sent; here the name is kept beside what people say.
if (field.relation.dataset.name !== undefined) field.relation.defaultValue = spoken(field.relation.value);
// All relations can be looked through before a letter is typed.
field.relation.addEventListener("click", () => { if (!field.relation.value) relation.open(); });

let before = wanted();
form.addEventListener("change", (event) => {
  if (event.target.name !== "find") return;
  // What is looked for now was given before: it goes where it is needed, if nothing is there.
  const from = field[wanted()], to = field[before];
  if (from !== field.relation && to !== field.relation && !to.value) {
    to.value = from.value;
    if (from.dataset.name !== undefined) to.dataset.name = from.dataset.name;
  }
  from.value = "";
  delete from.dataset.name;
  before = wanted();
});

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const empty = given().find((part) => !meant(field[part]));
  if (empty) {
    field[empty].focus();
    return;
  }
  const choices = { find: wanted() };
  for (const part of given()) choices[part] = named(part);
  location.assign(address("/", choices));
});

// A page that comes back from the browser's memory shows the question of its address again.
const names = Object.fromEntries(Object.entries(field).map(([part, input]) => [part, input.dataset.name]));
addEventListener("pageshow", (event) => {
  if (!event.persisted) return;
  form.reset();
  before = wanted();
  for (const [part, name] of Object.entries(names)) if (name !== undefined) field[part].dataset.name = name;
});

// Where there are no answers to read, the next thing to do is to type; but no keyboard is to cover a phone's page.
if (matchMedia("(pointer: fine)").matches && !document.querySelector(".answers, .problem")) {
  field[given().find((part) => !field[part].value) ?? "head"].focus({ preventScroll: true });
}
openReasonsInPlace();
