// What axe-core finds in the theme: a search dialog without a name, landmarks of
// one name, and code and tables that scroll but are not reached by the keyboard.
document$.subscribe(() => {
  const search = document.querySelector(".md-search");
  if (search) search.setAttribute("aria-label", "Search");
  document.querySelectorAll(".md-nav .md-nav[aria-labelledby]").forEach((nested, number) => {
    const title = nested.querySelector(".md-nav__title")?.textContent.trim() ?? "";
    nested.setAttribute("aria-label", `${title}, list ${number + 1}`);
    nested.removeAttribute("aria-labelledby");
  });
  document.querySelectorAll(".md-code__nav").forEach((buttons, number) => {
    buttons.setAttribute("aria-label", `Code ${number + 1}`);
  });
  for (const block of document.querySelectorAll("pre > code, .md-typeset__scrollwrap")) {
    block.setAttribute("tabindex", "0");
  }
  for (const code of document.querySelectorAll(".md-typeset code")) keepOptionsWhole(code);
  // Lines of a printed table scroll: broken ones have no columns.
  for (const code of document.querySelectorAll("pre > code")) {
    code.classList.toggle("printed-table", code.textContent.includes("\u2500\u2500\u2500"));
  }
});

// No line ends within the name of an option, as after the hyphens of --max-drop.
function keepOptionsWhole(code) {
  const walker = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) texts.push(walker.currentNode);
  for (const text of texts) {
    if (text.parentNode.className === "option") continue;
    const parts = text.data.split(/(--?[a-z][\w-]*)/);
    if (parts.length === 1) continue;
    text.replaceWith(...parts.map((part, number) => {
      if (number % 2 === 0) return part;
      const span = document.createElement("span");
      span.className = "option";
      span.textContent = part;
      return span;
    }));
  }
}
