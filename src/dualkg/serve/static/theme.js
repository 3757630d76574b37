// Before the page is painted: the look that was chosen, where one was.
"use strict";
try {
  const chosen = localStorage.getItem("theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // A browser that keeps nothing follows the system.
}
