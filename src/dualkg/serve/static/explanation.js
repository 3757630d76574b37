// "Why?" and a probability open their explanation below the row.

import { element, requestElement, showError } from "./common.js";

let numOpened = 0;

export function openExplanationsInPlace(root = document) {
  for (const link of root.querySelectorAll("a[data-why], a[data-likely]")) {
    const id = `why-${++numOpened}`;
    const button = element("button", {
      type: "button",
      class: link.classList.contains("percent") ? "percent figure" : "plain",
      title: link.title || null,
      "aria-expanded": "false",
      "aria-controls": id,
    });
    button.append(...link.childNodes);
    const place = element("div", { id, class: "opened", hidden: true, "aria-live": "polite" });
    const row = link.closest("li");
    link.replaceWith(button);
    row.append(place);
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
