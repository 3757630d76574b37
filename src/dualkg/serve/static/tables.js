// Tables that can be sorted by any column: numbers first from the highest, names from A.

/** Rows without a number come last in both orders. */
function compareNumbers(a, b, sign) {
  if (a === "" || b === "") return (a === "") - (b === "");
  return sign * (Number(a) - Number(b));
}

function compareNames(a, b, sign) {
  return sign * a.localeCompare(b, "en", { numeric: true });
}

for (const table of document.querySelectorAll("[data-sortable]")) {
  const heads = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  heads.forEach((head, column) => {
    const numeric = head.classList.contains("number");
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sort";
    button.append(...head.childNodes);
    head.append(button);
    head.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const first = numeric ? "descending" : "ascending";
      const second = numeric ? "ascending" : "descending";
      const order = head.getAttribute("aria-sort") === first ? second : first;
      for (const other of heads) other.setAttribute("aria-sort", other === head ? order : "none");
      const sign = order === "ascending" ? 1 : -1;
      const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const rows = [...body.rows].map((row) => [value(row), row]);
      const compare = numeric ? compareNumbers : compareNames;
      rows.sort(([a], [b]) => compare(a, b, sign));
      body.append(...rows.map(([, row]) => row));
    });
  });
}
