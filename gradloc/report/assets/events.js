// ---- the list of events: rows are made as they are needed, so that thousands cost nothing

const table = document.getElementById("events");
const stage = document.getElementById("stage");
const PAGE = 50;
const order = data.rows.map((row, index) => ({ ...row, index, text: [row.id, `step ${row.step}`, row.words, row.cause, row.verdict, row.action].join(" ").toLowerCase() }));
let found = order; // what search and filters leave, sorted
let numShown = PAGE;
let current = null; // name of the event that is open or was last walked to

const size = (value) => (value === "Infinity" ? Infinity : value);

function list() {
  if (!table) return;
  const cell = (text, name) => make("td", { textContent: text, className: name });
  const lines = found.slice(0, numShown).map((row) => {
    const link = make("a", { href: `#event-${row.id}`, textContent: row.step });
    const token = make("td", { className: "token" }, make("code", { textContent: row.token || "none", dir: "ltr" }));
    const line = make("tr", { className: row.id === current ? "current" : "" }, make("td", { className: "step" }, link), token);
    for (const name of ["norm", "excess", "count", "fault", "cause", "verdict", "action"]) line.append(cell(row[name], name));
    return line;
  });
  table.tBodies[0].replaceChildren(...lines);
  const more = document.getElementById("more-events");
  more.hidden = numShown >= found.length;
  more.textContent = `Show ${Math.min(PAGE, found.length - numShown)} more of ${found.length.toLocaleString("en")}`;
  const isAll = found.length === order.length;
  document.getElementById("num-found").textContent = isAll ? count(order.length, "event") : `${found.length.toLocaleString("en")} of ${count(order.length, "event")}`;
}

function filter() {
  const words = document.getElementById("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const [cause, verdict] = ["only-cause", "only-verdict"].map((id) => document.getElementById(id).value);
  found = order.filter((row) => (!cause || row.cause === cause) && (!verdict || row.verdict === verdict) && words.every((word) => row.text.includes(word)));
  const head = table.querySelector('th:not([aria-sort="none"])');
  if (head) arrange(head.dataset.key, head.getAttribute("aria-sort") === "descending");
  numShown = PAGE;
  list();
}

function arrange(key, isDown) {
  const compare = {
    step: (a, b) => a.index - b.index,
    size: (a, b) => size(a.size) - size(b.size) || 0,
    times: (a, b) => size(a.times) - size(b.times) || 0,
    count: (a, b) => a.count - b.count,
  }[key] ?? ((a, b) => String(a[key]).localeCompare(String(b[key])));
  found = [...found].sort((a, b) => (isDown ? -compare(a, b) : compare(a, b)) || a.index - b.index);
}

function sort(head) {
  const isDown = head.getAttribute("aria-sort") !== "descending";
  all(table, "th").forEach((other) => other.setAttribute("aria-sort", "none"));
  head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
  arrange(head.dataset.key, isDown);
  list();
}

function fillFilters() {
  for (const [id, key] of [["only-cause", "cause"], ["only-verdict", "verdict"]]) {
    const names = [...new Set(order.map((row) => row[key]))].sort();
    document.getElementById(id).append(...names.map((name) => make("option", { value: name, textContent: name })));
  }
}

// ---- opening one event of many: the worst are in the page, compressed; of the others there is what the list knows

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

function outline(row) {
  const command = data.show.replace("''", /^[\w.-]+$/.test(row.id) ? row.id : `'${row.id.replaceAll("'", `'"'"'`)}'`);
  const figures = [[row.norm, "gradient norm"], [row.excess, "over the threshold"], [row.threshold, "threshold"]];
  const button = make("button", { type: "button", className: "copy", textContent: "Copy" });
  button.dataset.copy = command;
  return make("article", { className: "event", id: `event-${row.id}` },
    make("p", { className: "badges" }, make("span", { className: `badge ${row.verdict.replaceAll(" ", "_")}`, textContent: row.verdict }), make("span", { textContent: row.id })),
    make("h2", { className: "headline", textContent: `Step ${row.step}: ${row.cause}` }),
    make("p", { className: "text passage", dir: "ltr" }, make("mark", { className: "tok u hit", textContent: row.token || "no token" })),
    make("dl", { className: "figures" }, ...figures.map(([value, what]) => make("div", {}, make("dd", { textContent: value }), make("dt", { textContent: what })))),
    make("p", { textContent: "Its tokens and numbers are not in this page. This command shows them:" }),
    make("div", { className: "copyline" }, make("code", { textContent: command }), button));
}

// ---- a small table that sorts by the column whose head is pressed

function sortTable(head) {
  const [table, column] = [head.closest("table"), [...head.parentElement.children].indexOf(head)];
  const isDown = head.getAttribute("aria-sort") !== "descending";
  all(table, "th").forEach((other) => other.setAttribute("aria-sort", "none"));
  head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
  const value = (row) => row.children[column].textContent.replaceAll(",", "");
  const lines = [...table.tBodies[0].rows].sort((a, b) => value(a).localeCompare(value(b), "en", { numeric: true }));
  table.tBodies[0].replaceChildren(...(isDown ? lines.reverse() : lines));
}

async function show(id) {
  const row = order.find((item) => item.id === id);
  const packed = all(document, "script[data-packed]").find((item) => item.dataset.packed === id);
  if (!row && !packed) return;
  mark(id);
  if (!stage) return;
  open.length = 0;
  if (packed) {
    const event = await unpack(packed.textContent);
    if (current !== id) return; // another one was asked for in the meantime
    data.events[id] = { s: event.s, issue: event.issue };
    const template = make("template", { innerHTML: event.html });
    stage.replaceChildren(template.content);
  } else stage.replaceChildren(outline(row));
  greet(stage);
  stage.scrollIntoView();
}

function mark(id) {
  current = id;
  const at = found.findIndex((row) => row.id === id);
  if (at >= numShown) numShown = at + 1;
  list();
}

function follow() {
  const target = decodeURIComponent(location.hash);
  if (target.startsWith("#event-")) show(target.slice("#event-".length));
}

// j and k walk what search and filters leave, in the order shown.
function step(by) {
  if (!found.length) return;
  const at = found.findIndex((row) => row.id === current);
  const goal = found[at < 0 ? 0 : Math.min(Math.max(at + by, 0), found.length - 1)];
  history.replaceState(null, "", `#event-${encodeURIComponent(goal.id)}`);
  show(goal.id);
  if (!stage) document.getElementById(`event-${goal.id}`)?.scrollIntoView();
}

// An article starts with its first culprit described, and a passage with its culprit in sight: a chat's prompt has many lines.
function greet(root) {
  for (const hit of all(root, ".passage mark")) {
    const passage = hit.parentElement;
    passage.scrollTop += hit.getBoundingClientRect().top - passage.getBoundingClientRect().top - 70;
  }
  for (const article of all(root, "article.event")) {
    const hit = article.querySelector(".tok.hit[data-p]");
    if (hit) describe(hit);
  }
}
