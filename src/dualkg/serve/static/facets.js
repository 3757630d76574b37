// Facets of a list of facts: its rows by relation, type, verdict and so on, with counts.
//
// A row says what it is in data-facets, as JSON: the values of each facet. The verdict may change.

import { element, setFileParameter } from "./common.js";

const SHOWN = 8; // values of a facet, until all are asked for
const VERDICT = "Verdict";
const PARAMETER = "facet"; // of the address: "Relation:borders"
const wide = matchMedia("(min-width: 62rem)");

class Facets {
  #place;
  #lists;
  #status;
  #fields = new Map(); // by facet
  #all = new Set(); // facets of which all values are shown
  #chosen = new Map(); // sets of values, by facet
  #due = 0;

  constructor(place) {
    this.#place = place;
    this.#lists = (place.closest("section") ?? place.parentElement).querySelectorAll("ol, ul");
    this.#status = place.querySelector("[data-facets-status]");
    for (const text of new URLSearchParams(location.search).getAll(PARAMETER)) {
      const [facet] = text.split(":", 1);
      this.#values(facet).add(text.slice(facet.length + 1));
    }
    place.querySelector("[data-facets-clear]").addEventListener("click", () => {
      this.#chosen.clear();
      this.#choose();
    });
    // Beside a list they are open; above one they would push it down.
    const canBeBeside = place.parentElement.classList.contains("faceted");
    place.open = (canBeBeside && wide.matches) || this.#chosen.size > 0;
    wide.addEventListener("change", () => {
      place.open = canBeBeside && wide.matches;
    });
    // Rows arrive, get verdicts, and are hidden by other choices.
    const soon = () => this.#soon();
    const options = { childList: true, subtree: true, attributeFilter: ["data-verdict"] };
    for (const list of this.#lists) new MutationObserver(soon).observe(list, options);
    const section = place.closest("section");
    if (section) new MutationObserver(soon).observe(section, { attributeFilter: ["class"] });
    this.#setFiles();
    soon();
  }

  #values(facet) {
    if (!this.#chosen.has(facet)) this.#chosen.set(facet, new Set());
    return this.#chosen.get(facet);
  }

  #soon() {
    this.#due ||= requestAnimationFrame(() => {
      this.#due = 0;
      this.#update();
    });
  }

  /** The rows with the values of their facets; those that another choice hides are left out. */
  #rows() {
    const rows = [...this.#lists].flatMap((list) => [...list.children]);
    const admitted = rows.filter((row) => row.dataset.facets && !row.matches(".hides-unusual [data-unusual]"));
    return admitted.map((row) => {
      const of = JSON.parse(row.dataset.facets);
      return [row, { ...of, [VERDICT]: [row.dataset.verdict || "undecided"] }];
    });
  }

  /** Whether a row has one of the chosen values of each facet, or of each but one. */
  #fits(of, except = null) {
    return [...this.#chosen].every(([facet, values]) => {
      return facet === except || !values.size || of[facet]?.some((value) => values.has(value));
    });
  }

  #update() {
    const rows = this.#rows();
    const facets = new Map(); // the counts of all values, by facet
    for (const [, of] of rows) {
      for (const [facet, values] of Object.entries(of)) {
        if (!facets.has(facet)) facets.set(facet, new Map());
        const counts = facets.get(facet);
        for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
      }
    }
    for (const [facet, values] of this.#chosen) {
      if (!facets.has(facet)) facets.set(facet, new Map());
      for (const value of values) if (!facets.get(facet).has(value)) facets.get(facet).set(value, 0);
    }
    let number = 0;
    for (const [row, of] of rows) {
      // What somebody works on stays until the choice changes.
      const isShown = this.#fits(of) || row.contains(document.activeElement);
      if (row.hidden === isShown) row.hidden = !isShown;
      number += isShown;
    }
    const offered = [...facets].filter(([, counts]) => counts.size > 1 || this.#isChosen(counts));
    this.#place.hidden = !offered.length;
    this.#draw(offered, rows);
    const isFiltered = [...this.#chosen.values()].some((values) => values.size);
    const [shown, all] = [number, rows.length].map((count) => count.toLocaleString("en"));
    this.#status.textContent = isFiltered ? `${shown} of ${all}` : "";
    this.#place.querySelector("[data-facets-clear]").hidden = !isFiltered;
  }

  #isChosen(counts) {
    return [...this.#chosen.values()].some((values) => [...values].some((value) => counts.has(value)));
  }

  #draw(offered, rows) {
    const focused = document.activeElement.closest?.("[data-facet-value]")?.dataset.facetValue;
    for (const [facet, field] of this.#fields) {
      if (!offered.some(([name]) => name === facet)) {
        field.remove();
        this.#fields.delete(facet);
      }
    }
    for (const [facet, counts] of offered) {
      if (!this.#fields.has(facet)) {
        const field = element("fieldset", {}, element("legend", {}, facet));
        this.#fields.set(facet, field);
        this.#place.append(field);
      }
      const fitting = rows.filter(([, of]) => this.#fits(of, facet));
      const values = [...counts].sort(([a, n], [b, m]) => m - n || a.localeCompare(b, "en"));
      const isShort = values.length <= SHOWN + 1 || this.#all.has(facet);
      const shown = values.filter(([value], place) => {
        return isShort || place < SHOWN || this.#chosen.get(facet)?.has(value);
      });
      const choices = shown.map(([value]) => {
        const count = fitting.filter(([, of]) => of[facet]?.includes(value)).length;
        return this.#choice(facet, value, count);
      });
      if (!isShort) choices.push(this.#more(facet, values.length - shown.length));
      const field = this.#fields.get(facet);
      field.replaceChildren(field.firstChild, ...choices);
    }
    if (focused) {
      this.#place.querySelector(`[data-facet-value="${CSS.escape(focused)}"] input`)?.focus();
    }
  }

  /** A value with the number of rows that have it, by the choices of the other facets. */
  #choice(facet, value, count) {
    const box = element("input", { type: "checkbox" });
    box.checked = Boolean(this.#chosen.get(facet)?.has(value));
    box.addEventListener("change", () => {
      if (box.checked) this.#values(facet).add(value);
      else this.#values(facet).delete(value);
      this.#choose();
    });
    const name = element("span", { dir: "auto", class: "value" }, value);
    const number = element("span", { class: "number soft" }, count.toLocaleString("en"));
    return element("label", { "data-facet-value": `${facet}:${value}` }, box, name, number);
  }

  #more(facet, number) {
    const show = () => {
      this.#all.add(facet);
      this.#update();
      this.#fields.get(facet).querySelectorAll("input")[SHOWN]?.focus();
    };
    return element("button", { type: "button", class: "plain more", onclick: show }, `${number} more`);
  }

  /** The choice is in the address, so that the browser comes back to it. */
  #choose() {
    const here = new URL(location.href);
    here.searchParams.delete(PARAMETER);
    for (const text of this.#texts()) here.searchParams.append(PARAMETER, text);
    history.replaceState(history.state, "", here);
    this.#setFiles();
    this.#update();
  }

  /** Files have the rows that are listed. */
  #setFiles() {
    setFileParameter(PARAMETER, this.#texts());
  }

  #texts() {
    return [...this.#chosen].flatMap(([facet, values]) => [...values].map((value) => `${facet}:${value}`));
  }
}

for (const place of document.querySelectorAll("[data-facets-of-list]")) new Facets(place);
