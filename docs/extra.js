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
});
