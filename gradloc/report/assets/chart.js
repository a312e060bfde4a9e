// ---- the curve: uPlot draws a plot per panel over one axis of steps. Here: what is on them, the keys, two fingers.

const STATES = { healthy: 0.2, warning: 0.6, danger: 1 }; // height of the strip: no meaning rests on colour alone
const INK = { calm: "calm", spike: "spike", limit: "muted" };
const FONT = "11px system-ui, sans-serif";
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const short = (value) => {
  const size = Math.abs(value);
  if (size >= 1e6 || (size && size < 1e-3)) return value.toExponential(0).replace("e+", "e");
  return value.toLocaleString("en", { maximumSignificantDigits: 3 });
};

const isRound = (value) => [1, 2, 5].includes(Number((value / 10 ** Math.floor(Math.log10(value) + 1e-9)).toPrecision(3)));

class Chart {
  constructor(figure, chart) {
    Object.assign(this, { figure, chart, place: figure.querySelector(".plot"), at: null });
    for (const panel of chart.panels) for (const line of panel.lines) line.at = new Map(line.x.map((step, index) => [step, line.y[index]]));
    const lines = chart.panels.flatMap((panel) => panel.lines);
    const sorted = (values) => [...new Set(values)].sort((a, b) => a - b);
    this.steps = sorted([...lines.filter((line) => line.kind !== "limit").flatMap((line) => line.x), ...chart.marks.map(([step]) => step)]);
    const ends = chart.bands.flatMap(([first, last]) => [first, last]); // a run may end in values that are not finite
    this.x = sorted([...this.steps, ...ends, ...lines.flatMap((line) => line.x)]);
    this.whole = [this.x[0], this.x.at(-1)].map((step, index, [first, last]) => (first === last ? step + 2 * index - 1 : step));
    const label = (step, norm) => `${chart.unit} ${step}: ${norm === null ? "not finite" : short(norm)}`;
    this.marks = chart.marks.map(([step, norm, place, note]) => ({ step, norm, link: make("a", { href: `#${place}`, tabIndex: -1, className: norm > 0 ? "mark" : "mark lost", ariaLabel: `${chart.noun} at ${chart.unit} ${step}`, title: `${label(step, norm)}, ${note}` }) }));
    this.strips = chart.bands.map(([first, last, state, note]) => ({ first, last, part: this.strip(state, note) }));
    this.plots = chart.panels.map((panel, index) => this.plot(panel, index));
    this.main = this.plots[0];
    this.main.over.append(...this.marks.map(({ link }) => link));
    this.listen();
    this.describe(null);
    new ResizeObserver(() => this.resize(this.place.clientWidth)).observe(this.place);
  }

  size(width, index) {
    const isLast = index === this.chart.panels.length - 1;
    return { width: Math.max(width, 160), height: (index ? 66 : Math.max(200, Math.min(width * 0.24, 270))) + (isLast ? 42 : 0) };
  }

  plot(panel, index) {
    const isLast = index === this.chart.panels.length - 1;
    const axis = { stroke: () => colour("muted"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false }, font: FONT };
    const rows = index || !this.marks.length ? panel.lines : [...panel.lines, { kind: "mark", label: this.chart.noun, at: new Map(this.marks.map(({ step, norm }) => [step, norm])), x: [] }];
    const made = new uPlot({
      ...this.size(this.place.clientWidth, index),
      legend: { show: false },
      scales: { x: { time: false, range: (plot, low, high) => (low < high ? [low, high] : this.whole) }, y: panel.is_log ? { distr: 3, range: (plot, low, high) => (low ? [low / 1.6, high * 1.6] : [1, 10]) } : {} },
      series: [{}, ...rows.map(({ kind, label, x }) => ({
        label, spanGaps: true, stroke: () => colour(INK[kind] ?? "spike"), width: kind === "calm" ? 1.7 : 1.2, dash: kind === "limit" ? [5, 4] : [],
        points: { show: x.length === 1, size: 5 }, ...(kind === "mark" ? { paths: () => null } : {}),
      }))],
      axes: [
        { ...axis, show: isLast, size: 28, incrs: [1, 2, 5].flatMap((part) => [1, 10, 100, 1e3, 1e4, 1e5, 1e6].map((by) => part * by)).sort((a, b) => a - b), label: this.chart.axis, labelSize: 14, labelFont: FONT, values: (plot, steps) => steps.map((step) => (Number.isInteger(step) ? step.toLocaleString("en") : "")) },
        { ...axis, grid: { ...axis.grid, filter: (plot, values) => values.map((value) => (!panel.is_log || isRound(value) ? value : null)) }, size: 58, space: index ? 22 : 34, values: (plot, values) => values.map((value) => (value === null || (panel.is_log && !isRound(value)) ? "" : short(value))) },
      ],
      cursor: { y: false, sync: { key: "steps" }, drag: { x: true, y: false, dist: 8 }, points: { size: 7, show: (plot, row) => rows[row - 1].kind !== "mark" && undefined } },
      padding: [index ? 16 : 10, 20, isLast ? 4 : 7, 0],
      hooks: {
        setScale: [(plot, key) => key === "x" && this.plots && this.zoom(plot.scales.x.min, plot.scales.x.max)],
        setCursor: [(plot) => plot === this.main && this.describe(plot.cursor.left >= 0 ? this.nearest(plot.posToVal(plot.cursor.left, "x")) : null)],
        draw: [() => this.lay()],
      },
    }, [this.x, ...rows.map((line) => this.x.map((step) => { const y = line.at.get(step) ?? null; return panel.is_log && y <= 0 ? null : y; }))], this.place);
    made.over.append(make("span", { className: "name", textContent: panel.title }));
    return made;
  }

  // Events and the strip of states lie over the plot as elements, so that they can be pointed at, selected and read out.
  strip(state, note) {
    const part = make("i", { className: `state ${state}${note ? " noted" : ""}`, title: note });
    part.style.height = `${12 * STATES[state]}px`;
    if (note) Object.assign(part, { tabIndex: 0, role: "img", ariaLabel: note });
    this.figure.querySelector(".states").append(part);
    return part;
  }

  lay() {
    if (!this.main) return;
    const { left, width } = { left: this.main.over.offsetLeft, width: this.main.over.clientWidth };
    const across = (step) => Math.min(Math.max(this.main.valToPos(step, "x"), 0), width);
    for (const { step, norm, link } of this.marks) {
      link.hidden = step < this.main.scales.x.min || step > this.main.scales.x.max;
      Object.assign(link.style, { left: `${across(step)}px`, top: `${norm > 0 ? this.main.valToPos(norm, "y") : 4}px` });
    }
    for (const { first, last, part } of this.strips) Object.assign(part.style, { left: `${left + across(first - 0.5)}px`, width: `${across(last + 0.5) - across(first - 0.5)}px` });
  }

  inside() {
    return this.steps.filter((step) => step >= this.main.scales.x.min && step <= this.main.scales.x.max);
  }

  nearest(goal) {
    return this.inside().reduce((best, step) => (best === null || Math.abs(step - goal) < Math.abs(best - goal) ? step : best), null);
  }

  // The keys above the curve say what each line of the first plot is, and the names of the others what they draw; both
  // with the value at the step that is pointed at.
  describe(step) {
    this.at = step;
    const [first, ...below] = this.chart.panels;
    const valueOf = (line) => step === null ? null : line.at.get(line.kind === "limit" ? line.x.filter((x) => x <= step).at(-1) : step) ?? null;
    const entries = first.lines.map((line) => [line.label, valueOf(line), line.kind]);
    const others = below.map(({ title, lines: [line] }) => [title, line ? valueOf(line) : null]);
    others.forEach(([title, value], index) => { this.plots[index + 1].over.querySelector(".name").textContent = value === null ? title : `${title} ${plain(value)}`; });
    if (step === null && this.marks.length) entries.push([this.chart.noun, null, "mark"]);
    const keys = entries.map(([label, value, kind]) => make("span", { className: `key ${kind}` }, label, ...(value === null ? [] : [make("b", { textContent: ` ${plain(value)}` })])));
    if (step !== null) keys.unshift(make("b", { className: "step", textContent: `${this.chart.unit} ${step.toLocaleString("en")}` }));
    this.figure.querySelector(".keys").replaceChildren(...keys);
    const said = [...entries, ...others].filter(([, value]) => value !== null).map(([label, value]) => `${label} ${plain(value)}`);
    this.figure.querySelector(".readout").textContent = step === null ? "" : `${this.chart.unit} ${step}: ${said.join(", ")}`;
  }

  go(step) {
    for (const plot of this.plots) plot.setCursor(step === null ? { left: -10, top: -10 } : { left: plot.valToPos(step, "x"), top: plot.over.clientHeight / 2 });
    this.describe(step);
  }

  zoom(low, high) {
    const [first, last] = this.whole;
    const wide = Math.min(Math.max(high - low, 2), last - first);
    const min = Math.min(Math.max((low + high - wide) / 2, first), last - wide);
    const moved = this.plots.filter(({ scales: { x } }) => x.min !== min || x.max !== min + wide);
    for (const plot of moved) plot.setScale("x", { min, max: min + wide });
    this.figure.querySelector(".whole").hidden = wide >= last - first;
    if (moved.length) this.go(null); // a cursor from before would stand at another step
  }

  resize(place) {
    const width = this.paper ?? place;
    if (width < 120 || width === this.main.width) return;
    this.plots.forEach((plot, index) => plot.setSize(this.size(width, index)));
  }

  listen() {
    this.figure.querySelector(".whole").addEventListener("click", () => this.zoom(...this.whole));
    this.place.addEventListener("keydown", (event) => this.key(event));
    let held = null; // two fingers zoom, one moves the part that is shown
    const spots = (event) => [...event.touches].map((touch) => this.main.posToVal(touch.clientX - this.main.over.getBoundingClientRect().left, "x"));
    this.place.addEventListener("touchstart", (event) => { held = spots(event); }, { passive: true });
    this.place.addEventListener("touchmove", (event) => {
      const { min, max } = this.main.scales.x;
      const now = spots(event);
      if (now.length !== held?.length || (now.length === 1 && max - min >= this.whole[1] - this.whole[0])) return;
      event.preventDefault();
      const by = now.length === 2 ? Math.abs(held[0] - held[1]) / Math.max(Math.abs(now[0] - now[1]), 1e-9) : 1;
      const low = held[0] - (now[0] - min) * by;
      this.zoom(low, low + (max - min) * by);
      held = spots(event);
    }, { passive: false });
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { min, max } = this.main.scales.x;
    const inside = this.inside();
    const at = inside.indexOf(this.at);
    const middle = this.at ?? (min + max) / 2;
    const mark = this.chart.marks.find(([step]) => step === this.at);
    const act = {
      ArrowRight: () => this.go(inside[Math.min(at + 1, inside.length - 1)] ?? null),
      ArrowLeft: () => this.go(inside[Math.max(at - 1, 0)] ?? null),
      "+": () => this.zoom(middle - (max - min) / 4, middle + (max - min) / 4),
      "-": () => this.zoom(middle - (max - min), middle + (max - min)),
      0: () => this.zoom(...this.whole),
      Enter: mark && (() => { location.hash = `#${mark[2]}`; }),
    }[event.key === "=" ? "+" : event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }
}

const charts = all(document, "figure.chart").filter((figure) => data.charts[figure.dataset.chart]).map((figure) => new Chart(figure, data.charts[figure.dataset.chart]));
const redraw = () => charts.forEach((chart) => chart.plots.forEach((plot) => plot.redraw(false, true)));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
new MutationObserver(redraw).observe(document.documentElement, { attributeFilter: ["data-theme"] });
