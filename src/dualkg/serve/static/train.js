// Train: a file is sent and inspected, and a training on it is started.

import { address, element, requestJson, showError } from "./common.js";

const drop = document.querySelector("[data-drop]");
const field = document.querySelector("[data-file]");
const status = document.querySelector("[data-status]");
const inspection = document.querySelector("[data-inspection]");
const form = document.querySelector("[data-form]");
const COUNTS = { entities: "Entities", relations: "Relations", train: "Training triples", valid: "Validation", test: "Test" };
let file = ""; // the name that the server has given to the file

function post(where, content) {
  return requestJson(address(where), {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(content),
  });
}

async function send(chosen) {
  inspection.hidden = true;
  status.textContent = `Reading ${chosen.name} …`;
  try {
    const found = await post("/api/training/files", { name: chosen.name, text: await chosen.text() });
    file = found.file;
    status.textContent = `${chosen.name} can be trained on.`;
    show(found, chosen.name);
  } catch (error) {
    showError(status, error);
  }
}

function show(found, name) {
  const counts = Object.entries(COUNTS).map(([key, title]) =>
    element("div", {}, element("dt", {}, title), element("dd", { class: "large" }, found.counts[key].toLocaleString("en"))),
  );
  inspection.querySelector("[data-counts]").replaceChildren(...counts);
  const notes = found.notes.map((note) => element("li", {}, note));
  inspection.querySelector("[data-notes]").replaceChildren(...notes);
  const rows = found.examples.map((triple) =>
    element("tr", {}, ...triple.map((part) => element("td", {}, element("bdi", {}, part)))),
  );
  inspection.querySelector("[data-examples]").replaceChildren(...rows);
  const stem = name.replace(/\.[^.]*$/, "").replace(/[^A-Za-z0-9_-]+/g, "-").replace(/^[-_]+/, "");
  form.elements.name.value = stem.slice(0, 40) || "my-run";
  inspection.hidden = false;
}

if (drop) {
  field.addEventListener("change", () => field.files[0] && send(field.files[0]));
  for (const kind of ["dragover", "dragleave", "drop"]) {
    drop.addEventListener(kind, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", kind === "dragover");
      if (kind === "drop" && event.dataTransfer.files[0]) send(event.dataTransfer.files[0]);
    });
  }
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const { name, model, tune, epochs } = form.elements;
    try {
      await post("/api/training", {
        file,
        name: name.value,
        model: model.value,
        tune: tune.value === "yes",
        epochs: epochs.value ? Number(epochs.value) : null,
      });
      location.assign(address("/training", { name: name.value }));
    } catch (error) {
      showError(status, error);
    }
  });
}
