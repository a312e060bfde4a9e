const UNFOLD = 400; // tokens that one click unfolds
const OPEN_LIMIT = 4000; // unfolded tokens on the page; beyond that the oldest folds close again
const open = []; // unfolded folds, oldest first

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
    if (name === "share_error" && value === 0) continue;
    rows.push([label, name.startsWith("share") && typeof value === "number" ? `${+(100 * value).toPrecision(3)}%` : plain(value)]);
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

// ---- finding a token: Enter goes to the next one that holds the words, and unfolds what hides it

function find(field) {
  const article = articleOf(field);
  const words = field.value.toLowerCase();
  const blocks = all(article, ".sequence");
  const hits = [];
  blocks.forEach((block, index) => {
    for (const part of sequenceOf(block).parts) part.t.forEach((text, at) => text.toLowerCase().includes(words) && hits.push([index, part.a + at]));
  });
  field.setAttribute("aria-invalid", String(Boolean(words) && !hits.length));
  if (!words || !hits.length) return;
  const last = field.dataset.words === words ? Number(field.dataset.found) : -1;
  const found = (last + 1) % hits.length;
  Object.assign(field.dataset, { words, found });
  const [index, position] = hits[found];
  const seek = () => blocks[index].querySelector(`.tok[data-p="${position}"]`);
  const fold = all(blocks[index], ".fold").find((item) => position >= Number(item.dataset.a) && position < Number(item.dataset.b));
  for (let tries = 0; fold && !seek() && tries < 100; tries += 1) unfold(fold);
  const span = seek();
  if (!span) return;
  describe(span);
  span.scrollIntoView({ block: "center" });
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
