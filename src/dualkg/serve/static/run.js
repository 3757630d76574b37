// Tables that can be sorted by any column: numbers first from the highest, names from A.

for (const table of document.querySelectorAll("[data-sortable]")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => {
    const numeric = head.classList.contains("number");
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sort";
    button.append(...head.childNodes);
    head.append(button);
    head.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const first = numeric ? "descending" : "ascending", second = numeric ? "ascending" : "descending";
      const order = head.getAttribute("aria-sort") === first ? second : first;
      for (const other of heads) other.setAttribute("aria-sort", other === head ? order : "none");
      const sign = order === "ascending" ? 1 : -1;
      const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const rows = [...body.rows].map((row) => [value(row), row]);
      rows.sort(([a], [b]) => {
        if (numeric) return a === "" || b === "" ? (a === "") - (b === "") : sign * (Number(a) - Number(b));
        return sign * a.localeCompare(b, "en", { numeric: true });
      });
      body.append(...rows.map(([, row]) => row));
    });
  });
}
