// New facts: the list as it is found, decisions by button or key, each kept at once.

import { Refusal, address, ask, bar, complain, element, entityLink, percent, relationSaid, shortened, spoken } from "./common.js";

const section = document.querySelector("[data-list]");
const list = section.querySelector("[data-facts]");
const status = section.querySelector("[data-status]");
const progress = section.querySelector("[data-progress]");
const canDecide = "canDecide" in section.dataset;
const counts = Object.fromEntries([...document.querySelectorAll("[data-count]")].map((place) => [place.dataset.count, place]));

const PAUSE = 1000, MOST_TRIES = 120; // while another list is being made
const rows = []; // {fact, item, verdict}
const done = []; // what can be taken back: {row, before}
let current = -1;

// --- The list ------------------------------------------------------------------------------------------------------

const key = (fact) => JSON.stringify([fact.head, fact.relation, fact.tail].map((thing) => thing.name ?? thing));

async function find() {
  const { relation, minProbability, top } = section.dataset;
  const choices = { top, relation: relation ?? null, min_probability: Number(minProbability) || null };
  status.textContent = "Looking for new facts …";
  try {
    const decided = new Map((await ask("/api/decisions")).decisions.map((one) => [key(one), one.verdict]));
    for await (const line of patiently(address("/api/complete", choices))) {
      if (line.kind === "error") throw new Refusal(line.error);
      if (line.kind === "progress") {
        progress.hidden = false;
        progress.max = line.of;
        progress.value = line.done;
      } else if (line.kind === "triple") show(line, decided.get(key(line)));
    }
    status.textContent = said();
    mayFocus(0);
    section.dataset.ready = rows.length;
  } catch (error) {
    status.textContent = "";
    complain(status, error);
  } finally {
    progress.hidden = true;
  }
}

function said() {
  const number = rows.length.toLocaleString("en");
  if (!rows.length) return "Nothing that is as probable was found.";
  return rows.length === 1 ? "1 new fact" : `${number} new facts`;
}

/** One list is made at a time: while another is, this one waits for its turn. */
async function* patiently(where) {
  for (let tries = 0; ; tries++) {
    try {
      yield* lines(where);
      return;
    } catch (error) {
      if (error.status !== 503 || tries >= MOST_TRIES) throw error;
      status.textContent = "Another list is being made; this one waits for its turn …";
      await new Promise((later) => setTimeout(later, PAUSE));
    }
  }
}

/** Lines of JSON as they arrive. */
async function* lines(where) {
  const reply = await fetch(where).catch(() => { throw new Refusal("The server does not answer. Is it still running?"); });
  if (!reply.ok) throw new Refusal((await reply.json().catch(() => ({}))).error ?? `The server answered with status ${reply.status}.`, reply.status);
  let rest = "";
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done: ended } = await reader.read();
    const parts = (rest + (value ?? "")).split("\n");
    rest = parts.pop();
    for (const part of parts) if (part) yield JSON.parse(part);
    if (ended) return;
  }
}

function show(fact, verdict) {
  const number = rows.length;
  const sure = fact.probability === undefined
    ? element("span", { class: "belief soft number" }, `score ${fact.score.toFixed(2)}`)
    : element("span", { class: "belief" }, bar(fact.probability), element("span", { class: "percent" }, percent(fact.probability)));
  const why = address("/why", { head: fact.head.name, relation: fact.relation.name, tail: fact.tail.name });
  const button = (name, wanted) => element(
    "button",
    { type: "button", class: "plain", "aria-pressed": "false", "data-wanted": wanted, tabindex: -1,
      onclick: () => { current = number; decide(row, row.verdict === wanted ? undefined : wanted); } },
    name,
  );
  const item = element(
    "li",
    { class: "fact", tabindex: number ? -1 : 0, onfocus: () => reach(number) },
    element("span", { class: "rank" }, String(fact.rank)),
    element("span", { class: "what" }, entityLink(fact.head), " ", relationSaid(fact.relation), " ", entityLink(fact.tail)),
    sure,
    element(
      "span",
      { class: "doing" },
      element("a", { class: "small soft", href: why }, "Why"),
      ...(canDecide ? [button("Accept", "accepted"), button("Reject", "rejected")] : []),
    ),
  );
  const row = { fact, item, verdict: undefined };
  rows.push(row);
  paint(row, verdict);
  list.append(item);
}

function paint(row, verdict) {
  row.verdict = verdict;
  if (verdict) row.item.dataset.verdict = verdict;
  else delete row.item.dataset.verdict;
  for (const button of row.item.querySelectorAll("[data-wanted]")) {
    button.setAttribute("aria-pressed", String(button.dataset.wanted === verdict));
  }
}

// --- Decisions -----------------------------------------------------------------------------------------------------

let sending = Promise.resolve();

/** At once on the page, then on the server, in the order they were made; what the server refuses is taken back. */
function decide(row, verdict, { undoing = false } = {}) {
  const before = row.verdict;
  paint(row, verdict);
  if (!undoing) done.push({ row, before });
  const { head, relation, tail } = row.fact;
  const body = { decisions: [{ head: head.name, relation: relation.name, tail: tail.name, verdict: verdict ?? "undecided" }] };
  sending = sending.then(async () => {
    try {
      const found = await ask("/api/decisions", {}, { method: "POST", body });
      for (const [name, place] of Object.entries(counts)) place.textContent = found[name].toLocaleString("en");
      status.textContent = `${verdict ? verdict[0].toUpperCase() + verdict.slice(1) : "Undecided again"}: ${shortened(head.label)}, ${shortened(spoken(relation.label))}, ${shortened(tail.label)}.`;
    } catch (error) {
      paint(row, before);
      complain(status, error);
    }
  });
}

function undo() {
  const last = done.pop();
  if (!last) return;
  decide(last.row, last.before, { undoing: true });
  focusOn(rows.indexOf(last.row));
}

// --- Keys ----------------------------------------------------------------------------------------------------------

function reach(number) {
  if (current >= 0 && rows[current]) {
    rows[current].item.tabIndex = -1;
    for (const button of rows[current].item.querySelectorAll("button")) button.tabIndex = -1;
  }
  current = number;
  rows[number].item.tabIndex = 0;
  for (const button of rows[number].item.querySelectorAll("button")) button.tabIndex = 0;
}

function focusOn(number) {
  reach(number);
  rows[number].item.focus({ preventScroll: true });
  rows[number].item.scrollIntoView({ block: "nearest" });
}

/** The first row takes the keys where nothing else has them. */
function mayFocus(number) {
  if (rows[number]) reach(number);
}

const visible = (row) => row.item.checkVisibility?.() ?? row.item.offsetParent !== null;

/** The next row that can be seen, and that fits; the same one where there is none. */
function step(by, fits = () => true) {
  for (let number = current + by; number >= 0 && number < rows.length; number += by) {
    if (visible(rows[number]) && fits(rows[number])) return focusOn(number);
  }
  return undefined;
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !rows.length) return;
  if (event.target.closest("input, select, textarea")) return;
  const row = rows[Math.max(current, 0)];
  const has = row.item.contains(document.activeElement);
  const verdict = { a: "accepted", r: "rejected" }[event.key];
  // Nothing is decided on that does not have the focus: the first key gives it.
  if (!has && ["a", "r", "j", "k"].includes(event.key)) focusOn(Math.max(current, 0));
  else if (event.key === "j") step(1);
  else if (event.key === "k") step(-1);
  else if (verdict && canDecide) {
    decide(row, verdict);
    step(1, (other) => !other.verdict);
  } else if (event.key === "u" && canDecide) undo();
  else if (event.key === "Enter" && event.target === row.item) row.item.querySelector(".doing a").click();
  else return;
  event.preventDefault();
});

// --- Choices -------------------------------------------------------------------------------------------------------

section.querySelector("[data-show]").addEventListener("change", (event) => { list.dataset.only = event.target.value; });

const sieve = document.querySelector("[data-sieve]");
const least = sieve.querySelector("[data-least]");
least?.addEventListener("input", () => {
  sieve.querySelector("[data-said]").textContent = `${Math.round(100 * least.value)} %`;
});

find();
