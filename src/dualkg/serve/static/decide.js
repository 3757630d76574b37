// Decisions by the buttons beside a fact, each stored at once.

import { address, element, requestJson, showError } from "./common.js";

/** Who decides, as given on the page of decisions. */
export function curator() {
  try {
    return localStorage.getItem("curator") || null;
  } catch {
    return null;
  }
}

/** Store decisions {head, relation, tail, verdict}; returns the numbers of all decisions. */
export function store(decisions) {
  const by = curator();
  const signed = decisions.map((decision) => ({ ...decision, decided_by: by }));
  return requestJson(address("/api/decisions"), {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ decisions: signed }),
  });
}

/** Show a verdict, or none, on a row and its buttons. */
export function paint(row, verdict) {
  if (verdict) row.dataset.verdict = verdict;
  else delete row.dataset.verdict;
  for (const button of row.querySelectorAll("[data-wanted]")) {
    button.setAttribute("aria-pressed", String(button.dataset.wanted === verdict));
  }
  row.querySelector("[data-chip]")?.remove();
  if (!verdict || !row.dataset.chips) return;
  const chip = element("span", { class: `chip ${verdict}`, "data-chip": "" }, verdict);
  (row.querySelector(".what") ?? row).append(" ", chip);
}

/** Decide by all buttons of the page; a decision that the server refuses is undone. */
export function listenToDecisions() {
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-wanted]");
    const row = button?.closest("[data-head]");
    if (!row) return;
    const { head, relation, tail, verdict: before } = row.dataset;
    const verdict = before === button.dataset.wanted ? undefined : button.dataset.wanted;
    row.dataset.chips = "yes";
    paint(row, verdict);
    try {
      await store([{ head, relation, tail, verdict: verdict ?? "undecided" }]);
      row.dataset.saved = verdict ?? "undecided";
      row.dispatchEvent(new CustomEvent("decided", { detail: verdict }));
    } catch (error) {
      paint(row, before);
      const place = element("div", { class: "opened" });
      row.append(place);
      showError(place, error);
    }
  });
}

if (!document.querySelector("[data-list]")) listenToDecisions();
