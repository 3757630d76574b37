// Buttons that copy the texts of a page.

import { element } from "./common.js";

const DONE = 2000; // milliseconds in which a button says that it has copied

for (const place of document.querySelectorAll("[data-copy]")) {
  const code = place.querySelector("code");
  const hint = element("span", { class: "visually-hidden" }, ` as ${place.dataset.copy}`);
  const word = element("span", {}, "Copy");
  const button = element("button", { type: "button", class: "plain" }, word, hint);
  button.addEventListener("click", async () => {
    word.textContent = (await copied(code)) ? "Copied" : "Selected";
    setTimeout(() => {
      word.textContent = "Copy";
    }, DONE);
  });
  place.append(button);
}

/** Copy the text of an element; where the browser refuses, as on plain HTTP, select it. */
async function copied(code) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    return true;
  } catch {
    getSelection().selectAllChildren(code);
    return false;
  }
}
