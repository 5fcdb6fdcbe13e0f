// What Sphinx lacks: the level of headings in the side bar, and code that the keyboard can scroll.
document.addEventListener("DOMContentLoaded", () => {
    for (const each of document.querySelectorAll('[role="heading"]:not([aria-level])')) each.ariaLevel = "2";
    for (const each of document.querySelectorAll("pre, .table-wrapper")) each.tabIndex = 0;
});
