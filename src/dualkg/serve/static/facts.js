// New facts: rows as they are found, decisions by button or key, each stored at once.

import { ServerError, address, element, parsed, request, showError } from "./common.js";
import { paint, store } from "./decide.js";
import { openExplanationsInPlace } from "./explanation.js";

const section = document.querySelector("[data-list]");
const list = section.querySelector("[data-facts]");
const status = section.querySelector("[data-status]");
const progress = section.querySelector("[data-progress]");
const provisional = section.querySelector("[data-provisional]");
const stop = section.querySelector("[data-stop]");
const stopping = new AbortController();
const canDecide = "canDecide" in section.dataset;
const countPlaces = [...document.querySelectorAll("[data-count]")];

// While another completion is running:
const PAUSE = 300; // milliseconds
const MAX_TRIES = 400;
const rows = []; // <li> elements
const done = []; // what can be undone: {row, before}
let current = -1;
const keys = document.querySelector("[data-keys]");
const KINDS = { all: "new", open: "undecided", accepted: "accepted", rejected: "rejected" };
// The row of the address, which is focused again when somebody comes back.
const wantedRow = new URLSearchParams(location.search).get("row");

// --- The list ------------------------------------------------------------------------------------

async function find() {
  const { relation, minProbability, top, types, show: shown } = section.dataset;
  const params = { top, types, relation, min_probability: Number(minProbability) || null, show: shown };
  status.textContent = "Searching for new facts …";
  progress.removeAttribute("value"); // until the first report, nobody knows how much there is
  progress.hidden = false;
  stop.hidden = false;
  try {
    for await (const line of retried(address("/facts/rows", params))) {
      if (line.kind === "error") throw new ServerError(line.error);
      if (line.kind === "progress") {
        reached = line;
        if (line.done) {
          progress.max = line.total;
          progress.value = line.done;
        }
        status.textContent = `Searching for new facts${timeLeft(line)} …`;
      } else if (line.kind === "list") begin(line.is_final);
      else if (line.kind === "triple" && isShown) show(line.html);
    }
    status.textContent = summary();
    finish();
  } catch (error) {
    status.textContent = "";
    if (!stopping.signal.aborted) showError(status, error);
    else {
      const again = element("a", { href: location.href }, "Search again");
      status.replaceChildren(`Stopped after ${shareOf(reached)} of the search. `, again);
      if (rows.length) finish();
    }
    if (rows.length) provisional.textContent = stoppedNote();
  } finally {
    progress.hidden = true;
    stop.hidden = true;
  }
}

let reached = null; // the last line of progress

/** "12 %" of the queries are done. */
function shareOf(line) {
  const share = line?.total ? (100 * line.done) / line.total : 0;
  return share < 1 ? "less than 1 %" : `${Math.floor(share)} %`;
}

function stoppedNote() {
  return `${rows.length.toLocaleString("en")} provisional rows: the best that were found before the stop, not the best of all.`;
}

let isShown = true; // whether the rows of the list that is being received are shown
let focused = ""; // the row that is focused again when its list is replaced

/** A list begins that replaces the one before; the best so far do not disturb somebody who reads. */
function begin(isFinal) {
  const row = document.activeElement.closest(".fact");
  isShown = isFinal || !(row || list.querySelector(".opened:not([hidden])"));
  if (!isShown) return;
  focused = row?.dataset.row ?? "";
  rows.length = 0;
  current = -1;
  list.replaceChildren();
  list.toggleAttribute("data-so-far", !isFinal);
  provisional.hidden = isFinal;
}

function finish() {
  if (rows.length && current < 0) reach(0);
  if (keys && rows.length) keys.hidden = false;
  section.dataset.ready = rows.length;
}

/** ", about 40 s left", once that can be told. */
function timeLeft({ seconds_left: seconds }) {
  if (!seconds || seconds < 1) return "";
  return `, about ${seconds < 100 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`} left`;
}

function summary() {
  const kind = KINDS[section.dataset.show];
  if (!rows.length) return kind === "new" ? "No triple is as probable as this." : `There is no ${kind} fact.`;
  return `${rows.length.toLocaleString("en")} ${kind} ${rows.length === 1 ? "fact" : "facts"}`;
}

/** One completion runs at a time: while another does, this one waits. */
async function* retried(where) {
  for (let tries = 0; ; tries++) {
    try {
      yield* lines(where);
      return;
    } catch (error) {
      if (error.status !== 503 || tries >= MAX_TRIES) throw error;
      status.textContent = "Waiting for another completion …";
      await new Promise((resume) => setTimeout(resume, PAUSE));
    }
  }
}

/** JSON lines as they arrive. */
async function* lines(where) {
  let rest = "";
  const reader = (await request(where, { signal: stopping.signal })).body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done: ended } = await reader.read();
    const parts = (rest + (value ?? "")).split("\n");
    rest = parts.pop();
    for (const part of parts) if (part) yield JSON.parse(part);
    if (ended) return;
  }
}

/** Append a row that the server rendered. */
function show(html) {
  const number = rows.length;
  const row = document.adoptNode(parsed(html).querySelector("li"));
  row.tabIndex = number ? -1 : 0;
  row.addEventListener("focus", () => reach(number));
  for (const button of row.querySelectorAll("[data-wanted]")) {
    const { wanted } = button.dataset;
    button.addEventListener("click", () => {
      current = number;
      decide(row, row.dataset.verdict === wanted ? undefined : wanted);
    });
  }
  openExplanationsInPlace(row);
  rows.push(row);
  list.append(row);
  if ((focused || wantedRow) === row.dataset.row) focusOn(number);
}

// --- Decisions -----------------------------------------------------------------------------------

const NEWS = { accepted: "Accepted", rejected: "Rejected", undecided: "Undecided again" };
let sending = Promise.resolve();

/**
 * Decide at once on the page, then on the server, in the order of the decisions.
 *
 * A decision that the server refuses is undone.
 */
function decide(row, verdict, { undoing = false } = {}) {
  const { head, relation, tail, verdict: before } = row.dataset;
  paint(row, verdict);
  if (!undoing) done.push({ row, before });
  const decision = { head, relation, tail, verdict: verdict ?? "undecided" };
  sending = sending.then(async () => {
    try {
      const counts = await store([decision]);
      for (const place of countPlaces) {
        place.textContent = counts[place.dataset.count].toLocaleString("en");
      }
      status.textContent = `${NEWS[decision.verdict]}: ${textOf(row)}.`;
    } catch (error) {
      paint(row, before);
      showError(status, error);
    }
  });
}

function textOf(row) {
  const parts = [...row.querySelectorAll(".what > .name, .what > .relation")];
  return parts.map((part) => part.textContent).join(", ");
}

function undo() {
  const last = done.pop();
  if (!last) return;
  // The list may have been replaced since.
  const number = rows.findIndex((row) => row.dataset.row === last.row.dataset.row);
  decide(rows[number] ?? last.row, last.before, { undoing: true });
  if (number >= 0) focusOn(number);
}

// --- Keys ----------------------------------------------------------------------------------------

function reach(number) {
  if (current >= 0 && rows[current]) {
    rows[current].tabIndex = -1;
    for (const button of rows[current].querySelectorAll("button")) button.tabIndex = -1;
  }
  const isNew = number !== current;
  current = number;
  rows[number].tabIndex = 0;
  if (isNew && section.dataset.ready) {
    const here = new URL(location.href);
    here.searchParams.set("row", rows[number].dataset.row);
    history.replaceState(history.state, "", here);
  }
  for (const button of rows[number].querySelectorAll("button")) button.tabIndex = 0;
}

function focusOn(number) {
  reach(number);
  rows[number].focus({ preventScroll: true });
  rows[number].scrollIntoView({ block: "nearest" });
}

const visible = (row) => row.checkVisibility?.() ?? row.offsetParent !== null;

/** Focus the next visible row that fits; returns whether there is one. */
function step(by, fits = () => true) {
  for (let number = current + by; number >= 0 && number < rows.length; number += by) {
    if (visible(rows[number]) && fits(rows[number])) {
      focusOn(number);
      return true;
    }
  }
  return false;
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !rows.length) return;
  if (event.target.closest("input, select, textarea")) return;
  const row = rows[Math.max(current, 0)];
  const has = row.contains(document.activeElement);
  const verdict = { a: "accepted", r: "rejected" }[event.key];
  // Only a focused row is decided on: the first key focuses one.
  if (!has && ["a", "r", "j", "k"].includes(event.key)) {
    if (visible(row)) focusOn(Math.max(current, 0));
    else step(1) || step(-1);
  } else if (event.key === "j") step(1);
  else if (event.key === "k") step(-1);
  else if (verdict && canDecide) {
    decide(row, verdict);
    step(1, (other) => !other.dataset.verdict);
  } else if (event.key === "u" && canDecide) undo();
  else if (event.key === "Enter" && event.target === row) row.querySelector(".doing [aria-expanded]")?.click();
  else return;
  event.preventDefault();
});

// --- Filters -------------------------------------------------------------------------------------

const filter = document.querySelector("[data-filter]");
const threshold = filter.querySelector("[data-min]");
threshold?.addEventListener("input", () => {
  filter.querySelector("[data-threshold]").textContent = `${Math.round(100 * threshold.value)} %`;
});

stop.addEventListener("click", () => stopping.abort());
find();
