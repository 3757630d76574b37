// "Why?" opens the reasons below the answer. They come as the service's own page, in which every name is escaped.

import { complain, element, Refusal } from "./common.js";

let numOpened = 0;

export function openReasonsInPlace() {
  for (const link of document.querySelectorAll("a[data-why]")) {
    const id = `why-${++numOpened}`;
    const button = element("button", { type: "button", class: "plain", "aria-expanded": "false", "aria-controls": id });
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
  place.replaceChildren(element("p", { class: "waiting" }, "Looking for reasons …"));
  try {
    place.replaceChildren(await reasons(where));
    place.dataset.filled = "yes";
  } catch (error) {
    complain(place, error);
  }
}

async function reasons(where) {
  const reply = await fetch(where).catch(() => {
    throw new Refusal("The server does not answer. Is it still running?");
  });
  const text = await reply.text();
  if (reply.headers.get("Content-Type")?.startsWith("application/json")) throw new Refusal(JSON.parse(text).error, reply.status);
  const found = new DOMParser().parseFromString(text, "text/html");
  const section = found.querySelector("[data-reasons]");
  if (section) return document.adoptNode(section);
  throw new Refusal(found.querySelector(".lead")?.textContent ?? `The server answered with status ${reply.status}.`);
}
