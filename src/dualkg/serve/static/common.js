// Shared by all pages. Names become text, never markup: nothing here writes HTML.

const { run: RUN, firstRun: FIRST_RUN } = document.body.dataset;

// --- Addresses -----------------------------------------------------------------------------------

/** An address with parameters; the run is added unless it is the default. */
export function address(path, params = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    if (value !== null && value !== undefined) query.append(key, value);
  }
  if (RUN !== FIRST_RUN && !query.has("run")) query.set("run", RUN);
  return query.size ? `${path}?${query}` : path;
}

/** The page of an entity; ?name= for names that a browser takes for folders, or that end in .json. */
export function entityAddress(name) {
  const ambiguous = ["", ".", ".."].includes(name) || name.endsWith(".json");
  return ambiguous ? address("/entity", { name }) : address(`/entity/${encodeURIComponent(name)}`);
}

/** The page of a relation, likewise. */
export function relationAddress(name) {
  const ambiguous = ["", ".", ".."].includes(name) || name.endsWith(".json");
  return ambiguous ? address("/relation", { name }) : address(`/relation/${encodeURIComponent(name)}`);
}

// --- Elements ------------------------------------------------------------------------------------

/** An element: element("a", {href: "/", class: "name"}, "text", other elements …). Text stays text. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** HTML that the server sent, as a document; the server escapes every name. */
export function parsed(html) {
  return new DOMParser().parseFromString(html, "text/html");
}

// --- Requests ------------------------------------------------------------------------------------

/** An error response of the server: its message and its status. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

const UNREACHABLE = "The server does not answer. Is it still running?";

/** The response of an address; throws a ServerError with the server's message, which is JSON or a page. */
export async function request(where, options = {}) {
  const reply = await fetch(where, options).catch((error) => {
    throw error.name === "AbortError" ? error : new ServerError(UNREACHABLE);
  });
  if (reply.ok) return reply;
  const text = await reply.text();
  const isJson = reply.headers.get("Content-Type")?.startsWith("application/json");
  const message = isJson
    ? JSON.parse(text).error
    : parsed(text).querySelector(".lead")?.textContent;
  throw new ServerError(message ?? `The server answered with status ${reply.status}.`, reply.status);
}

export async function requestJson(where, options) {
  return (await request(where, options)).json();
}

/** An element of another page of the server, for this one. */
export async function requestElement(where, selector) {
  const reply = await request(where);
  const page = parsed(await reply.text());
  return document.adoptNode(page.querySelector(selector));
}

/** Show an error in a place of the page; screen readers announce it. */
export function showError(place, error) {
  const message = error instanceof ServerError ? error.message : "Something went wrong on this page.";
  place.replaceChildren(element("p", { class: "problem", role: "alert" }, message));
  if (!(error instanceof ServerError)) console.error(error);
}

// --- Files of a list ------------------------------------------------------------------------------

/** Give the files of the lists of this page some values of a parameter, and no others. */
export function setFileParameter(name, values) {
  for (const link of document.querySelectorAll("[data-list-file]")) {
    const where = new URL(link.href);
    where.searchParams.delete(name);
    for (const value of values) where.searchParams.append(name, value);
    link.setAttribute("href", where.pathname + where.search);
  }
}

// --- Completion while typing ---------------------------------------------------------------------

let numLists = 0;

/**
 * Make a text field a combobox.
 *
 * `find(text, signal)` returns items {name, text, note, about}; `onPick(item)` gets the chosen one. The
 * field has the name of the item as `dataset.name` until its text is changed.
 */
export function combobox(input, { find, onPick = () => {}, wait = 60 }) {
  const id = `options-${++numLists}`;
  const list = element("ul", { class: "options", role: "listbox", id, hidden: true });
  const label = input.labels?.[0]?.textContent ?? input.name;
  list.setAttribute("aria-label", label);
  input.removeAttribute("list");
  const attributes = {
    role: "combobox",
    "aria-autocomplete": "list",
    "aria-expanded": "false",
    "aria-controls": id,
    autocomplete: "off",
    autocapitalize: "off",
    spellcheck: "false",
  };
  for (const [key, value] of Object.entries(attributes)) input.setAttribute(key, value);
  const around = element("span", { class: "combo" });
  input.replaceWith(around);
  around.append(input, list);

  let items = [];
  let active = -1; // the number of the marked item
  let timer = 0;
  let search = new AbortController();

  const close = () => {
    clearTimeout(timer);
    search.abort();
    list.hidden = true;
    active = -1;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
  };
  const mark = (number) => {
    active = number;
    [...list.children].forEach((option, index) => {
      option.setAttribute("aria-selected", String(index === number));
    });
    const option = list.children[number];
    if (option) {
      input.setAttribute("aria-activedescendant", option.id);
      option.scrollIntoView({ block: "nearest" });
    } else {
      input.removeAttribute("aria-activedescendant");
    }
  };
  const pick = (number) => {
    const item = items[number];
    input.value = item.text;
    input.dataset.name = item.name;
    close();
    onPick(item);
  };
  const optionOf = (item, number) => {
    const attributes = {
      role: "option",
      id: `${id}-${number}`,
      "aria-selected": "false",
      onpointerdown: (event) => event.preventDefault(), // the field keeps the focus
      onclick: () => pick(number),
      onpointermove: () => {
        if (active !== number) mark(number);
      },
    };
    const parts = [element("span", { class: "name", dir: "auto" }, item.text)];
    if (item.note) {
      parts.push(element("span", { class: "soft" }, " ", element("bdi", {}, item.note)));
    }
    if (item.about) parts.push(element("span", { class: "soft about" }, item.about));
    return element("li", attributes, ...parts);
  };
  const open = (matches) => {
    items = matches;
    list.replaceChildren(...matches.map(optionOf));
    if (!matches.length) {
      const attributes = { class: "none", role: "option", "aria-disabled": "true" };
      list.append(element("li", attributes, "No similar name."));
    }
    list.hidden = false;
    input.setAttribute("aria-expanded", "true");
    mark(matches.length ? 0 : -1);
  };
  const lookUp = () => {
    clearTimeout(timer);
    search.abort();
    search = new AbortController();
    const { signal } = search;
    timer = setTimeout(async () => {
      try {
        const matches = await find(input.value, signal);
        if (signal.aborted) return;
        if (matches === null) close();
        else open(matches);
      } catch (error) {
        if (error.name !== "AbortError") close();
      }
    }, wait);
  };

  input.addEventListener("input", () => {
    delete input.dataset.name;
    lookUp();
  });
  input.addEventListener("blur", close);
  input.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    const isOpen = !list.hidden;
    const last = items.length - 1;
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      if (!isOpen) lookUp();
      else if (last >= 0 && event.key === "ArrowDown") mark(active >= last ? 0 : active + 1);
      else if (last >= 0) mark(active <= 0 ? last : active - 1);
    } else if (event.key === "Enter" && isOpen && active >= 0) {
      event.preventDefault();
      pick(active);
    } else if (event.key === "Tab" && isOpen && active >= 0) {
      pick(active);
    } else if (event.key === "Escape" && isOpen) {
      event.preventDefault();
      close();
    }
  });
  return { open: lookUp, close };
}

/** Search of entities by the server; results are cached. */
export function findEntities(k = 8) {
  return cached(async (q, signal) => {
    const reply = await requestJson(address("/api/entities", { q, k }), { signal });
    return reply.entities;
  });
}

function cached(search) {
  const cache = new Map();
  return async (text, signal) => {
    if (!text.trim()) return null;
    if (!cache.has(text)) cache.set(text, await search(text, signal));
    return cache.get(text);
  };
}

/** The relations that a page offers for a text field. */
export function offeredRelations(form) {
  const options = [...form.querySelectorAll("#relations option")];
  return options.map(({ value, label }) => ({ name: value, text: label || value, note: null }));
}

/** Search among items of the page: texts that begin with the words first, then those that contain them. */
export function findAmong(items) {
  const texts = items.map((item) => `${normalized(item.text)} ${normalized(item.name)}`);
  return async (typed) => {
    const words = normalized(typed.trim());
    const matches = items.map((item, number) => ({ item, rank: matchRank(texts[number], words) }));
    return matches
      .filter((match) => match.rank < NO_MATCH)
      .sort((a, b) => a.rank - b.rank)
      .slice(0, MAX_MATCHES)
      .map((match) => match.item);
  };
}

const MAX_MATCHES = 200;
const NO_MATCH = 3;

/** 0 at the beginning of a text, 1 at the beginning of a word, 2 within a word. */
function matchRank(text, words) {
  if (text.startsWith(words)) return 0;
  if (text.includes(` ${words}`)) return 1;
  return text.includes(words) ? 2 : NO_MATCH;
}

function normalized(text) {
  return text.normalize("NFKD").replace(/\p{M}/gu, "").replaceAll("_", " ").toLowerCase();
}

/** The name in a field: of the picked item, or else as it was typed. */
export function nameIn(input) {
  return input.dataset.name ?? input.value.trim();
}

// --- The search in the header ---------------------------------------------------------------------

/** Entities and relations of the server; a relation comes first only if it has just this name. */
async function findPages(q, signal) {
  const reply = await requestJson(address("/search.json", { q, k: 8 }), { signal });
  const entities = reply.entities.map((item) => ({ ...item, page: entityAddress(item.name) }));
  const relations = reply.relations.map((item) => ({ ...item, page: relationAddress(item.name) }));
  const isExact = (item) => item.match_type === "exact";
  const items = [...entities, ...relations];
  return [...items.filter(isExact), ...items.filter((item) => !isExact(item))];
}

function startSearch() {
  const field = document.querySelector("[data-search] input[type=search]");
  if (!field) return; // no run is served yet
  combobox(field, { find: cached(findPages), onPick: (item) => location.assign(item.page) });
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.closest("input, select, textarea, [contenteditable]");
    if (event.key !== "/" || isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    field.focus();
    field.select();
  });
}

// --- Light and dark ------------------------------------------------------------------------------

const system = matchMedia("(prefers-color-scheme: dark)");

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : system.matches;
}

/** The current colour of a token such as "--ink", for a canvas. */
export function colour(token) {
  const probe = element("span", { hidden: true });
  probe.style.color = `var(${token})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** Call a function whenever light becomes dark or dark becomes light. */
export function onTheme(listener) {
  document.addEventListener("themechange", listener);
}

function startTheme() {
  const button = document.querySelector("[data-theme-toggle]");
  const name = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", isDark() ? "Use light colours" : "Use dark colours");
  };
  const changed = () => {
    name();
    document.dispatchEvent(new Event("themechange"));
  };
  button.hidden = false;
  name();
  system.addEventListener("change", changed);
  button.addEventListener("click", () => {
    const next = isDark() ? "light" : "dark";
    // The system's own choice is not stored, so that the page follows the system again.
    if ((next === "dark") === system.matches) delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    try {
      if (document.documentElement.dataset.theme) localStorage.setItem("theme", next);
      else localStorage.removeItem("theme");
    } catch {
      // Without storage the choice holds for this page only.
    }
    changed();
  });
}

function startRuns() {
  document.querySelector("[data-runs]")?.addEventListener("change", (event) => {
    const next = new URL(location.href);
    next.searchParams.set("run", event.target.value);
    location.assign(next);
  });
}

startTheme();
startRuns();
startSearch();
