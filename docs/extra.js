// What axe-core finds in the theme: a search dialog without a name, landmarks of
// one name, and code and tables that scroll but are not reached by the keyboard.
document$.subscribe(() => {
  const search = document.querySelector(".md-search");
  if (search) search.setAttribute("aria-label", "Search");
  for (const nested of document.querySelectorAll(".md-nav .md-nav[aria-labelledby]")) {
    const title = document.getElementById(nested.getAttribute("aria-labelledby"));
    nested.setAttribute("aria-label", `${title?.textContent.trim()}, level ${nested.dataset.mdLevel}`);
    nested.removeAttribute("aria-labelledby");
  }
  document.querySelectorAll(".md-code__nav").forEach((buttons, number) => {
    buttons.setAttribute("aria-label", `Code ${number + 1}`);
  });
  for (const block of document.querySelectorAll("pre > code, .md-typeset__scrollwrap")) {
    block.setAttribute("tabindex", "0");
  }
});
