// ---- wiring: one listener per kind, because articles come and go

document.addEventListener("click", (event) => {
  const { target } = event;
  if (target.matches(".fold")) unfold(target);
  else if (target.matches(".copy")) copy(target);
  else if (target.id === "more-events") { numShown += PAGE; list(); }
  else if (target.closest("#events th")) sort(target.closest("th"));
  else if (target.closest(".sortable th")) sortTable(target.closest("th"));
  else if (target.matches(".tok[data-p]")) describe(target);
  else if (target.id === "help-button") document.getElementById("help").showModal();
  else if (target.closest("a")) {
    if (target.closest("a").getAttribute("href") === decodeURIComponent(location.hash)) follow();
  } else if (target.id === "theme") {
    const root = document.documentElement;
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = isDark ? "light" : "dark";
  }
});

for (const kind of ["mouseover", "focusin"]) {
  document.addEventListener(kind, (event) => {
    if (event.target.matches(".tok[data-p]")) describe(event.target);
    const part = event.target.closest(".noted");
    if (part) document.getElementById("state-note").textContent = part.getAttribute("aria-label");
  });
}

document.addEventListener("change", (event) => {
  if (event.target.matches(".measures input")) shade(articleOf(event.target));
  else if (event.target.matches(".tools select")) filter();
});
document.addEventListener("input", (event) => event.target.id === "search" && filter());

document.addEventListener("keydown", (event) => {
  const { target, key } = event;
  if (target.matches("input.find") && key === "Enter") find(target);
  if (target.id === "search" && ["Enter", "Escape"].includes(key)) {
    target.blur();
    if (key === "Enter" && found.length) step(found.some((row) => row.id === current) ? 0 : 1);
  }
  if (target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  walk(event);
  const act = {
    j: () => step(1),
    k: () => step(-1),
    "/": () => document.getElementById("search")?.focus(),
    y: () => document.querySelector(".todo .copy")?.click(),
    "?": () => document.getElementById("help").showModal(),
  }[key];
  if (!act || event.defaultPrevented || document.querySelector("dialog[open]")) return;
  event.preventDefault();
  act();
});

addEventListener("hashchange", follow);

// On paper everything is open, the colours are those of the day, and the curve is as wide as the page.
const PAPER = 680;
let before = null; // what was closed, and the theme
addEventListener("beforeprint", () => {
  const closed = all(document, "details:not([open])");
  before ??= { closed, theme: document.documentElement.dataset.theme ?? "" };
  closed.forEach((item) => { item.open = true; });
  document.documentElement.dataset.theme = "light";
  charts.forEach((chart) => { chart.paper = PAPER; chart.resize(); });
  redraw();
});
addEventListener("afterprint", () => {
  before.closed.forEach((item) => { item.open = false; });
  if (before.theme) document.documentElement.dataset.theme = before.theme;
  else delete document.documentElement.dataset.theme;
  charts.forEach((chart) => { delete chart.paper; chart.resize(chart.place.clientWidth); });
  before = null;
});
if (table) { fillFilters(); list(); }
follow();
if (stage && !stage.children.length) {
  const worst = document.querySelector(".eyebrow a");
  const id = worst ? worst.getAttribute("href").slice("#event-".length) : order[0]?.id;
  const { scrollX, scrollY } = window;
  if (id) {
    show(id).then(() => {
      const story = stage.querySelector(".story");
      if (story) story.hidden = true; // it is at the top of the page already
      scrollTo(scrollX, scrollY);
    });
  }
}
greet(document);
