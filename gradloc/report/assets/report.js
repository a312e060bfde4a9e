// Opens events, shades, describes and unfolds tokens, sorts the list. No libraries, no requests; text enters the
// page through textContent only.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("payload").textContent);
  const UNFOLD = 400; // tokens that one click unfolds
  const OPEN_LIMIT = 4000; // unfolded tokens on the page; beyond that the oldest folds close again
  const open = []; // unfolded folds, oldest first
  const all = (root, query) => Array.from(root.querySelectorAll(query));
  const make = (name, properties, ...children) => {
    const element = Object.assign(document.createElement(name), properties);
    element.append(...children);
    return element;
  };

  const plain = (value) => (typeof value === "number" ? value.toLocaleString("en", { maximumSignificantDigits: 4 }) : value);

  // ---- tokens: where they lie in the payload, and how they look

  const articleOf = (element) => element.closest("article.event");
  const sequenceOf = (element) => {
    const event = data.events[articleOf(element).dataset.event];
    return event.s[Number(element.closest(".sequence").dataset.sequence)];
  };
  const partAt = (sequence, position) => sequence.parts.find((p) => position >= p.a && position < p.a + p.t.length);
  const measureOf = (article) => article.querySelector(".measures input:checked")?.value;

  function levelAt(sequence, position, measure) {
    const part = partAt(sequence, position);
    return (part && part.l[measure] && part.l[measure][position - part.a]) || "-";
  }

  function paint(span, sequence, measure, culprits) {
    const position = Number(span.dataset.p);
    span.className = `tok ${levelAt(sequence, position, measure)}${culprits.has(position) ? " hit" : ""}`;
  }

  function shade(article) {
    const chosen = article.querySelector(".measures input:checked");
    if (!chosen) return;
    article.querySelector(".legend .low").textContent = chosen.dataset.low;
    article.querySelector(".legend .high").textContent = chosen.dataset.high;
    article.querySelector(".legend .meaning").textContent = chosen.dataset.meaning;
    article.querySelector(".ramp").classList.toggle("one-sided", chosen.dataset.low === "0");
    for (const block of all(article, ".sequence")) {
      const sequence = sequenceOf(block);
      const culprits = new Set(sequence.c);
      for (const span of all(block, ".tok[data-p]")) paint(span, sequence, chosen.value, culprits);
    }
  }

  function describe(span) {
    const article = articleOf(span);
    const sequence = sequenceOf(span);
    const position = Number(span.dataset.p);
    const part = partAt(sequence, position);
    if (!part) return;
    const at = position - part.a;
    const record = article.querySelector(".record");
    const rows = [["position", position]];
    if (at < part.i.length) rows.push(["token id", part.i[at]]);
    for (const [name, label] of Object.entries(data.labels)) {
      if (!(name in part.v)) continue;
      const value = Array.isArray(part.v[name]) ? part.v[name][at] : part.v[name];
      rows.push([label, name === "share" && typeof value === "number" ? `${+(100 * value).toPrecision(3)}%` : plain(value)]);
    }
    record.querySelector("h4").textContent = part.t[at];
    record.querySelector(".hint").textContent = sequence.c.includes(position) ? "A culprit." : "";
    record.querySelector("dl").replaceChildren(
      ...rows.map(([label, text]) => make("div", {}, make("dt", { textContent: label }), make("dd", { textContent: text }))),
    );
    all(article, ".tok.at").forEach((other) => other.classList.remove("at"));
    span.classList.add("at");
  }

  // ---- folds: a fold shows a window of its tokens, and moves on with each click

  function close(fold) {
    const at = open.indexOf(fold);
    if (at >= 0) open.splice(at, 1);
    all(fold.parentElement, `.tok[data-fold="${fold.dataset.a}"]`).forEach((span) => span.remove());
    fold.textContent = fold.dataset.label;
    fold.dataset.next = fold.dataset.a;
    fold.setAttribute("aria-expanded", "false");
  }

  function unfold(fold) {
    const [first, last] = [Number(fold.dataset.a), Number(fold.dataset.b)];
    fold.dataset.label ??= fold.textContent;
    const start = Number(fold.dataset.next ?? first);
    if (start >= last) return close(fold);
    const end = Math.min(start + UNFOLD, last);
    const sequence = sequenceOf(fold);
    const culprits = new Set(sequence.c);
    const measure = measureOf(articleOf(fold));
    const spans = document.createDocumentFragment();
    for (let position = start; position < end; position += 1) {
      const part = partAt(sequence, position);
      const span = make("span", { textContent: part ? part.t[position - part.a] : "?" });
      Object.assign(span.dataset, { p: position, fold: first });
      paint(span, sequence, measure, culprits);
      spans.append(span);
    }
    fold.before(spans);
    fold.dataset.next = end;
    fold.setAttribute("aria-expanded", "true");
    fold.textContent = end < last ? `⋯ ${(last - end).toLocaleString("en")} more` : "fold again";
    if (!open.includes(fold)) open.push(fold);
    while (open.length > 1 && document.querySelectorAll(".tok[data-fold]").length > OPEN_LIMIT) close(open[0]);
    const mine = all(fold.parentElement, `.tok[data-fold="${first}"]`);
    mine.slice(0, Math.max(mine.length - OPEN_LIMIT, 0)).forEach((span) => span.remove());
  }

  // ---- keyboard: arrows walk the tokens, C goes to the next culprit

  function walk(event) {
    const box = event.target.closest(".tokens");
    if (!box || event.ctrlKey || event.metaKey || event.altKey) return;
    const spans = all(box, ".tok[data-p]");
    const at = spans.indexOf(event.target);
    const hits = spans.filter((span) => span.classList.contains("hit"));
    const goal = {
      ArrowRight: () => spans[at + 1] ?? spans[0],
      ArrowLeft: () => spans[at - 1] ?? spans[0],
      Home: () => spans[0],
      End: () => spans[spans.length - 1],
      c: () => hits.find((span) => spans.indexOf(span) > at) ?? hits[0],
    }[event.key.length === 1 ? event.key.toLowerCase() : event.key]?.();
    if (!goal) return;
    event.preventDefault();
    goal.tabIndex = -1;
    goal.focus();
  }

  // ---- the list of events

  const table = document.getElementById("events");
  let numShown = 50;

  function page() {
    all(table, "tbody tr").forEach((row, index) => { row.hidden = index >= numShown; });
    const more = document.getElementById("more-events");
    if (more) more.hidden = numShown >= table.tBodies[0].rows.length;
  }

  function valueOf(text, kind) {
    if (kind === "t") return text;
    if (text.startsWith("NaN") || text.startsWith("∞")) return Infinity;
    const value = parseFloat(text.replace(/,/g, ""));
    return Number.isNaN(value) ? -Infinity : value;
  }

  function sort(head) {
    const isDown = head.getAttribute("aria-sort") !== "descending";
    all(table, "th").forEach((other) => other.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
    const { cellIndex } = head;
    const keyed = Array.from(table.tBodies[0].rows, (row) => [valueOf(row.cells[cellIndex].textContent, head.dataset.kind), row]);
    const compare = head.dataset.kind === "t" ? (a, b) => a[0].localeCompare(b[0]) : (a, b) => (a[0] < b[0] ? -1 : a[0] > b[0] ? 1 : 0);
    keyed.sort((a, b) => (isDown ? -compare(a, b) : compare(a, b)));
    table.tBodies[0].append(...keyed.map(([, row]) => row));
    page();
  }

  // ---- opening one event of many

  const stage = document.getElementById("stage");

  function show(id) {
    const template = all(document, "template[data-event]").find((item) => item.dataset.event === id);
    if (!stage || !template) return;
    open.length = 0;
    stage.replaceChildren(template.content.cloneNode(true));
    greet(stage);
    stage.scrollIntoView();
    mark(id);
  }

  function mark(id) {
    if (!table) return;
    all(table, "tr.current").forEach((row) => row.classList.remove("current"));
    all(table, "a").find((link) => link.getAttribute("href") === `#event-${id}`)?.closest("tr").classList.add("current");
  }

  const follow = () => {
    const target = decodeURIComponent(location.hash);
    if (target.startsWith("#event-")) show(target.slice("#event-".length));
  };

  // An article starts with its first culprit described.
  function greet(root) {
    for (const article of all(root, "article.event")) {
      const hit = article.querySelector(".tok.hit[data-p]");
      if (hit) describe(hit);
    }
  }

  // ---- wiring: one listener per kind, because articles come and go

  document.addEventListener("click", (event) => {
    const { target } = event;
    if (target.matches(".fold")) unfold(target);
    else if (target.id === "more-events") { numShown += 50; page(); }
    else if (target.closest("#events th")) sort(target.closest("th"));
    else if (target.matches(".tok[data-p]")) describe(target);
    else if (target.closest("a") && stage) {
      const href = target.closest("a").getAttribute("href") ?? target.closest("a").getAttribute("xlink:href");
      if (href === decodeURIComponent(location.hash)) follow();
    } else if (target.id === "theme") {
      const root = document.documentElement;
      const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = isDark ? "light" : "dark";
    }
  });
  document.addEventListener("mouseover", (event) => event.target.matches(".tok[data-p]") && describe(event.target));
  document.addEventListener("focusin", (event) => event.target.matches(".tok[data-p]") && describe(event.target));
  for (const kind of ["mouseover", "focusin"]) {
    document.addEventListener(kind, (event) => {
      const part = event.target.closest("svg .noted");
      if (part) document.getElementById("state-note").textContent = part.getAttribute("aria-label");
    });
  }
  document.addEventListener("change", (event) => event.target.matches(".measures input") && shade(articleOf(event.target)));
  document.addEventListener("keydown", walk);
  addEventListener("hashchange", follow);
  addEventListener("beforeprint", () => all(document, "details.part-of-event").forEach((item) => { item.open = true; }));
  follow();
  if (stage && !stage.children.length) {
    const first = document.querySelector("template[data-event]");
    if (first) stage.append(first.content.cloneNode(true));
  }
  greet(document);
})();
