// "Why?" opens the explanation below a prediction.

import { element, requestElement, showError } from "./common.js";

let numOpened = 0;

export function openExplanationsInPlace() {
  for (const link of document.querySelectorAll("a[data-why]")) {
    const id = `why-${++numOpened}`;
    const button = element("button", {
      type: "button",
      class: "plain",
      "aria-expanded": "false",
      "aria-controls": id,
    });
    button.append(...link.childNodes);
    const place = element("div", { id, class: "opened", hidden: true, "aria-live": "polite" });
    link.replaceWith(button);
    button.parentElement.append(place);
    button.addEventListener("click", () => toggle(button, place, link.href));
  }
}

async function toggle(button, place, where) {
  const open = button.getAttribute("aria-expanded") !== "true";
  button.setAttribute("aria-expanded", String(open));
  place.hidden = !open;
  if (!open || place.dataset.filled) return;
  place.replaceChildren(element("p", { class: "waiting" }, "Computing …"));
  try {
    place.replaceChildren(await requestElement(where, "[data-explanation]"));
    place.dataset.filled = "yes";
  } catch (error) {
    showError(place, error);
  }
}
