// A training: its progress and curves are loaded again while it goes on.

import { address, requestElement, requestJson, showError } from "./common.js";

const PAUSE = 1000; // milliseconds
const stop = document.querySelector("[data-stop]");

async function follow() {
  for (;;) {
    const place = document.querySelector("[data-training]");
    if ("over" in place.dataset) break;
    await new Promise((resume) => setTimeout(resume, PAUSE));
    if (document.hidden) continue;
    try {
      place.replaceWith(await requestElement(location.href, "[data-training]"));
    } catch (error) {
      showError(place, error);
      break;
    }
  }
  if (stop) stop.hidden = true;
}

stop?.addEventListener("click", async () => {
  stop.disabled = true;
  try {
    await requestJson(address("/api/training/stop"), {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ name: stop.dataset.name }),
    });
  } catch (error) {
    showError(stop.parentElement, error);
  }
});

follow();
