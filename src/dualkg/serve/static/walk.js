// A walk: a neighbour in the drawing of an entity is expanded below it, and so on.
//
// The entities of the walk are in the address, so that the browser comes back to the same place.

import { address, element, entityAddress, requestElement, showError } from "./common.js";

const heading = document.querySelector("main h1");
const first = document.querySelector("[data-drawings]");
const steps = []; // {name, label, section}

export function startWalk() {
  if (!first) return;
  document.querySelector("[data-walk-hint]").hidden = false;
  prepare(first, 0);
  resume(new URLSearchParams(location.search).getAll("walk"));
}

async function resume(names) {
  for (const [number, name] of names.entries()) {
    if (!(await expand(name, number, { isResumed: true }))) break;
  }
}

/** The entity of a page; its name itself is no attribute, since it may have control characters. */
function nameIn(where) {
  const page = new URL(where);
  return page.searchParams.get("name") ?? decodeURIComponent(page.pathname.split("/").at(-1));
}

/** Give each neighbour of a drawing a button that expands it; the links have the key +. */
function prepare(drawings, number) {
  for (const link of drawings.querySelectorAll("a[data-neighbour]")) {
    const name = nameIn(link.href);
    const label = link.querySelector("bdi").textContent;
    const button = element(
      "button",
      // The link has the key: a second stop beside each name would make a long way of tabs.
      { type: "button", class: "expand", tabindex: "-1", "aria-label": `Expand ${label}`, title: `Expand ${label}` },
      "+",
    );
    button.addEventListener("click", () => expand(name, number));
    link.setAttribute("aria-keyshortcuts", "+");
    link.addEventListener("keydown", (event) => {
      if (event.key !== "+" || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      expand(name, number);
    });
    link.after(button);
  }
}

/** Show the neighbours of an entity below drawing `number`; what was below it is removed. */
async function expand(name, number, { isResumed = false } = {}) {
  close(number);
  const place = element("div", { class: "drawings" }, element("p", { class: "waiting" }, "Looking …"));
  const section = element("section", { class: "walked", "data-walked": name }, place);
  const before = steps.at(-1)?.section ?? first;
  before.after(section);
  const step = { name, label: name, section };
  steps.push(step);
  try {
    const page = await requestElement(entityAddress(name), "main");
    if (!section.isConnected) return false; // another neighbour was expanded meanwhile
    step.label = page.querySelector("h1").textContent;
    place.replaceWith(page.querySelector("[data-drawings]"));
  } catch (error) {
    showError(place, error);
    return false;
  }
  section.prepend(trail(number + 1));
  const drawings = section.querySelector("[data-drawings]");
  // "7 more" leads to the list of facts on the page of that entity.
  for (const link of drawings.querySelectorAll("a.more")) {
    link.href = entityAddress(name) + link.getAttribute("href");
  }
  prepare(drawings, number + 1);
  remember();
  if (!isResumed) {
    section.querySelector("h3").focus({ preventScroll: true });
    section.scrollIntoView({ block: "nearest" });
  }
  return true;
}

/** The heading of a drawing: the way to it, and what else can be done from there. */
function trail(number) {
  const walked = steps.slice(0, number);
  const names = [heading.textContent, ...walked.map((step) => step.label)];
  const { name, label } = walked.at(-1);
  const start = nameIn(location.href);
  const closing = element("button", { type: "button", class: "plain" }, "Close");
  closing.addEventListener("click", () => {
    close(number - 1);
    remember();
    (steps.at(-1)?.section.querySelector("h3") ?? heading).focus();
  });
  const actions = [element("a", { href: entityAddress(name), class: "button plain" }, "Its page")];
  if (name !== start) {
    const where = address("/paths", { start, end: name });
    actions.push(element("a", { href: where, class: "button plain" }, `Paths from ${heading.textContent}`));
  }
  actions.push(closing);
  return element(
    "div",
    { class: "trail" },
    element("h3", { tabindex: "-1", "aria-label": `Neighbourhood of ${label}` }, names.join(" › ")),
    element("p", { class: "actions" }, ...actions),
  );
}

function close(number) {
  for (const step of steps.splice(number)) step.section.remove();
}

function remember() {
  const here = new URL(location.href);
  here.searchParams.delete("walk");
  for (const step of steps) here.searchParams.append("walk", step.name);
  history.replaceState(history.state, "", here);
}
