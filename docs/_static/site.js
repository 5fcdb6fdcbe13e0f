// What Sphinx lacks: the level of headings in the side bar, code and tables that the keyboard can scroll, and tables
// that fit: code in a cell may break behind the signs that join its words, and each cell knows the head of its column.
const SHORT = 24;

function fit(table) {
    for (const text of table.querySelectorAll("code .pre")) {
        const parts = text.textContent.split(/(?<=[_.,|/=(\[:-])|(?<=[a-z])(?=[A-Z])/);
        text.replaceChildren(...parts.flatMap((part) => [part, document.createElement("wbr")]));
    }
    const heads = Array.from(table.querySelectorAll("thead th"), (head) => head.textContent.trim());
    const cells = Array.from(table.querySelectorAll("tbody td"));
    if (heads.length < 3 || cells.every((cell) => cell.textContent.length <= SHORT || cell.cellIndex === 0)) return;
    table.classList.add("cards");
    // A box that is no table any more for the style is one still for a screen reader.
    table.role = "table";
    for (const row of table.rows) row.role = "row";
    for (const cell of cells) {
        cell.role = "cell";
        if (cell.textContent.trim()) cell.dataset.head = heads[cell.cellIndex];
    }
}

document.addEventListener("DOMContentLoaded", () => {
    for (const each of document.querySelectorAll('[role="heading"]:not([aria-level])')) each.ariaLevel = "2";
    for (const each of document.querySelectorAll("pre, .table-wrapper")) each.tabIndex = 0;
    document.querySelectorAll(".table-wrapper table").forEach(fit);
});
