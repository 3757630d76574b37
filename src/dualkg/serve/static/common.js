// What all pages share. Names become text, never markup: nothing here writes HTML.

const { run: RUN, firstRun: FIRST_RUN } = document.body.dataset;

// --- Addresses -----------------------------------------------------------------------------------------------------

/** An address with choices; the run is named where it is not the one that is asked anyway. */
export function address(path, choices = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(choices)) {
    for (const one of [value].flat()) if (one !== null && one !== undefined) query.append(key, one);
  }
  if (RUN !== FIRST_RUN && !query.has("run")) query.set("run", RUN);
  return query.size ? `${path}?${query}` : path;
}

/** The page of an entity; names that an address would change or mistake are asked for by ?name=. */
export function entityAddress(name) {
  const mistaken = ["", ".", ".."].includes(name) || name.endsWith(".json");
  return mistaken ? address("/entity", { name }) : address(`/entity/${encodeURIComponent(name)}`);
}

// --- Elements ------------------------------------------------------------------------------------------------------

/** An element: element("a", {href: "/", class: "name"}, "text", other elements …). Text stays text. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same within <svg>. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

/** A name as people can see it: neither empty, nor with letters that have no shape. */
export function shown(name) {
  const seen = name.replace(/\r\n|[\r\n]/g, "↵").replaceAll("\t", "⇥").replace(/[\x00-\x1f\x7f]/g, "\ufffd");
  return seen.trim() ? seen : `“${seen}”`;
}

const LONGEST_SHOWN = 160;

/** The same within a list; all of it is on the entity's page. */
export function shortened(name) {
  const seen = [...shown(name)];
  return seen.length <= LONGEST_SHOWN ? seen.join("") : `${seen.slice(0, LONGEST_SHOWN - 1).join("").trimEnd()}…`;
}

/** A relation as people say it: spoken_language is spoken language. */
export function spoken(label) {
  return shortened(label.replace(/^_+|_+$/g, "").replaceAll("_", " ") || label);
}

/** An entity by its label, as a link to its page. */
export function entityLink(thing) {
  return element("a", { class: "name", dir: "auto", href: entityAddress(thing.name) }, shortened(thing.label ?? thing.name));
}

export function relationSaid(thing) {
  return element("bdi", { class: "relation" }, spoken(thing.label ?? thing.name));
}

/** 0.05312 is 5.3 %. */
export function percent(probability) {
  if (probability > 0.999) return ">99.9 %";
  if (probability < 0.001) return "<0.1 %";
  return `${(100 * probability).toFixed(probability < 0.0995 || probability >= 0.995 ? 1 : 0)} %`;
}

export function bar(share, { known = false } = {}) {
  const width = `${(100 * Math.min(1, Math.max(0, share))).toFixed(1)}%`;
  const rect = svg("rect", { width, height: "100%" });
  return svg("svg", { class: known ? "bar known" : "bar", "aria-hidden": "true", focusable: "false" }, rect);
}

// --- Asking the service --------------------------------------------------------------------------------------------

/** What the service said when it could not answer: its sentence, its status, and names that may have been meant. */
export class Refusal extends Error {
  constructor(sentence, status = 0, near = []) {
    super(sentence);
    this.status = status;
    this.near = near;
  }
}

/** The JSON of an address such as "/api/tails"; throws a Refusal with the service's sentence. */
export async function ask(path, choices = {}, { signal, method = "GET", body } = {}) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json" };
  const sent = body === undefined ? undefined : JSON.stringify(body);
  let reply;
  try {
    reply = await fetch(address(path, choices), { signal, method, headers, body: sent });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The server does not answer. Is it still running?");
  }
  const found = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new Refusal(found.error ?? `The server answered with status ${reply.status}.`, reply.status, found.near);
  return found;
}

/** Show in a place what went wrong; read out by screen readers. */
export function complain(place, error) {
  const sentence = error instanceof Refusal ? error.message : "Something went wrong on this page.";
  place.replaceChildren(element("p", { class: "problem", role: "alert" }, sentence));
  if (!(error instanceof Refusal)) console.error(error);
}

// --- Completion as one types ---------------------------------------------------------------------------------------

let numLists = 0;

/**
 * Make a text field a combobox. `find(text, signal)` gives things {name, label, note}; `onPick(thing)` is told which one
 * was taken. The field then has `dataset.name`, the name that is meant, until its text is changed.
 */
export function combobox(input, { find, onPick = () => {}, wait = 60 }) {
  const id = `options-${++numLists}`;
  const list = element("ul", { class: "options", role: "listbox", id, hidden: true });
  const label = input.labels?.[0]?.textContent ?? input.name;
  list.setAttribute("aria-label", label);
  input.removeAttribute("list");
  for (const [key, value] of Object.entries({
    role: "combobox", "aria-autocomplete": "list", "aria-expanded": "false", "aria-controls": id,
    autocomplete: "off", autocapitalize: "off", spellcheck: "false",
  })) input.setAttribute(key, value);
  const around = element("span", { class: "combo" });
  input.replaceWith(around);
  around.append(input, list);

  let things = [], active = -1, timer = 0, asked = new AbortController();

  const close = () => {
    clearTimeout(timer);
    asked.abort();
    list.hidden = true;
    active = -1;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
  };
  const mark = (number) => {
    active = number;
    [...list.children].forEach((option, at) => option.setAttribute("aria-selected", String(at === number)));
    const option = list.children[number];
    if (option) {
      input.setAttribute("aria-activedescendant", option.id);
      option.scrollIntoView({ block: "nearest" });
    } else input.removeAttribute("aria-activedescendant");
  };
  const take = (number) => {
    const thing = things[number];
    input.value = shown(thing.label);
    input.dataset.name = thing.name;
    close();
    onPick(thing);
  };
  const open = (found) => {
    things = found;
    list.replaceChildren(...found.map((thing, number) => {
      const note = thing.note ?? (thing.label === thing.name ? null : shortened(thing.name));
      return element(
        "li",
        { role: "option", id: `${id}-${number}`, "aria-selected": "false",
          onpointerdown: (event) => event.preventDefault(), onclick: () => take(number),
          onpointermove: () => { if (active !== number) mark(number); } },
        element("span", { class: "name", dir: "auto" }, thing.said ?? shortened(thing.label)),
        note ? element("span", { class: "soft" }, " ", element("bdi", {}, note)) : null,
      );
    }));
    if (!found.length) {
      list.append(element("li", { class: "none", role: "option", "aria-disabled": "true" }, "No name is like this."));
    }
    list.hidden = false;
    input.setAttribute("aria-expanded", "true");
    mark(found.length ? 0 : -1);
  };
  const look = () => {
    clearTimeout(timer);
    asked.abort();
    asked = new AbortController();
    const { signal } = asked;
    timer = setTimeout(async () => {
      try {
        const found = await find(input.value, signal);
        if (signal.aborted) return;
        if (found === null) close();
        else open(found);
      } catch (error) {
        if (error.name !== "AbortError") close();
      }
    }, wait);
  };

  input.addEventListener("input", () => {
    delete input.dataset.name;
    look();
  });
  input.addEventListener("blur", close);
  input.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    const isOpen = !list.hidden, last = things.length - 1;
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      if (!isOpen) look();
      else if (last >= 0) mark(event.key === "ArrowDown" ? (active >= last ? 0 : active + 1) : active <= 0 ? last : active - 1);
    } else if (event.key === "Enter" && isOpen && active >= 0) {
      event.preventDefault();
      take(active);
    } else if (event.key === "Tab" && isOpen && active >= 0) {
      take(active);
    } else if (event.key === "Escape" && isOpen) {
      event.preventDefault();
      close();
    }
  });
  return { open: look, close };
}

/** For comboboxes of entities: the service looks, and what was found is remembered. */
export function findEntities(k = 8) {
  const remembered = new Map();
  return async (text, signal) => {
    if (!text.trim()) return null;
    if (!remembered.has(text)) remembered.set(text, (await ask("/api/entities", { q: text, k }, { signal })).entities);
    return remembered.get(text);
  };
}

/** For comboboxes of a few things that are there already: words that begin so before words that hold it. */
export function findAmong(things) {
  const folded = (text) => text.normalize("NFKD").replace(/\p{M}/gu, "").replaceAll("_", " ").toLowerCase();
  const texts = things.map((thing) => `${folded(thing.label)} ${folded(thing.name)}`);
  return async (text) => {
    const looked = folded(text.trim());
    const places = texts.map((known, number) => [known.startsWith(looked) ? 0 : known.includes(` ${looked}`) ? 1 : known.includes(looked) ? 2 : 3, number]);
    return places.filter(([rank]) => rank < 3).sort(([a, i], [b, j]) => a - b || i - j).slice(0, 200).map(([, number]) => things[number]);
  };
}

/** The name that a field means: of what was picked, or else as it was typed. */
export function meant(input) {
  return input.dataset.name ?? input.value.trim();
}

// --- Light and dark ------------------------------------------------------------------------------------------------

const system = matchMedia("(prefers-color-scheme: dark)");

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : system.matches;
}

/** The colour of a token such as "--ink" as it is now, for a canvas. */
export function colour(token) {
  const probe = element("span", { hidden: true });
  probe.style.color = `var(${token})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** Told whenever light becomes dark or dark becomes light. */
export function onTheme(told) {
  document.addEventListener("themechange", told);
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
    // What the system wants anyway is not kept, so that the page follows it again.
    if ((next === "dark") === system.matches) delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    try {
      if (document.documentElement.dataset.theme) localStorage.setItem("theme", next);
      else localStorage.removeItem("theme");
    } catch {
      // The choice holds for this page.
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
