// Decisions: undo, notes, a name for them, and files that are imported.

import { address, requestJson, showError } from "./common.js";
import { store } from "./decide.js";

const status = document.querySelector("[data-status]");
const countPlaces = [...document.querySelectorAll("[data-count]")];

function showCounts(counts) {
  for (const place of countPlaces) {
    place.textContent = counts[place.dataset.count].toLocaleString("en");
  }
}

/** Store a decision on the triple of a row. */
async function decide(row, verdict, note = null) {
  const { head, relation, tail } = row.dataset;
  try {
    showCounts(await store([{ head, relation, tail, verdict, note }]));
    return true;
  } catch (error) {
    showError(status, error);
    return false;
  }
}

for (const row of document.querySelectorAll("[data-decision]")) {
  const verdict = row.dataset.verdict;
  const button = row.querySelector("[data-undo]");
  const note = row.querySelector("[data-note]");
  button?.addEventListener("click", async () => {
    const undone = row.dataset.undone;
    if (!(await decide(row, undone ? verdict : "undecided", note.value || null))) return;
    if (undone) delete row.dataset.undone;
    else row.dataset.undone = "yes";
    button.firstChild.textContent = undone ? "Undo" : `Decide again: ${verdict}`;
    status.textContent = undone ? "Decided again." : "The decision is taken back.";
  });
  note?.addEventListener("change", async () => {
    if (await decide(row, verdict, note.value || null)) status.textContent = "The note is saved.";
  });
}

const curator = document.querySelector("[data-curator]");
if (curator) {
  try {
    curator.value = localStorage.getItem("curator") ?? "";
    curator.addEventListener("change", () => localStorage.setItem("curator", curator.value.trim()));
  } catch {
    curator.disabled = true; // without storage a name would be forgotten
  }
}

document.querySelector("[data-import]")?.addEventListener("change", async (event) => {
  const [file] = event.target.files;
  if (!file) return;
  status.textContent = "Importing …";
  try {
    const counts = await requestJson(address("/api/decisions/import"), {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ name: file.name, text: await file.text() }),
    });
    showCounts(counts);
    location.reload();
  } catch (error) {
    showError(status, error);
    event.target.value = "";
  }
});
