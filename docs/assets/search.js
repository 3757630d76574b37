// An option such as --min-probability is searched by its name: to the search, a dash before a word excludes it.
document.addEventListener(
  "input",
  (event) => {
    const box = event.target;
    if (!box.matches(".md-search__input")) return;
    const words = box.value.replace(/(^|\s)-+/g, "$1");
    if (words !== box.value) box.value = words;
  },
  true,
);
