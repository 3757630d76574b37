// The best new facts of a page: searched for when the page is open, or when somebody asks for them.

import { element, requestElement, showError } from "./common.js";
import "./decide.js";
import { openExplanationsInPlace } from "./explanation.js";

// While another completion is running:
const PAUSE = 1000; // milliseconds
const MAX_TRIES = 60;

for (const place of document.querySelectorAll("[data-best]")) {
  const link = place.querySelector("a");
  const load = () => fill(place, link.href);
  if ("atOnce" in place.dataset) load();
  else {
    link.addEventListener("click", (event) => {
      event.preventDefault();
      load();
    });
  }
}

async function fill(place, where) {
  place.replaceChildren(element("p", { class: "waiting" }, "Searching …"));
  for (let tries = 0; ; tries++) {
    try {
      place.replaceChildren(await requestElement(where, "[data-best-facts]"));
      openExplanationsInPlace(place);
      return;
    } catch (error) {
      if (error.status !== 503 || tries >= MAX_TRIES) {
        showError(place, error);
        return;
      }
      await new Promise((resume) => setTimeout(resume, PAUSE));
    }
  }
}
