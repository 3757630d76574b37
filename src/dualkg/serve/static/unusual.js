// Facts of an unusual type can be hidden; the choice is stored, and holds for all lists.

import { setFileParameter } from "./common.js";

const KEY = "hide-unusual";

for (const place of document.querySelectorAll("[data-unusual-switch]")) {
  const box = place.querySelector("input");
  const count = place.querySelector("[data-unusual-count]");
  const section = place.closest("section");

  const update = () => {
    const number = section.querySelectorAll("li[data-unusual]").length;
    place.hidden = number === 0;
    count.textContent = number.toLocaleString("en");
    section.classList.toggle("hides-unusual", box.checked);
    setFileParameter("hide_unusual", box.checked ? ["true"] : []);
  };
  try {
    box.checked = localStorage.getItem(KEY) !== null;
  } catch {
    // Without storage nothing is hidden at first.
  }
  box.addEventListener("change", () => {
    try {
      if (box.checked) localStorage.setItem(KEY, "yes");
      else localStorage.removeItem(KEY);
    } catch {
      // The choice holds for this page only.
    }
    update();
  });
  // Rows of some lists arrive later.
  for (const list of section.querySelectorAll("ol, ul")) {
    new MutationObserver(update).observe(list, { childList: true });
  }
  update();
}
