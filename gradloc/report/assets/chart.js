// ---- the curve: panels over one axis of steps; drag to zoom, point or arrow keys to read values

const SVG = "http://www.w3.org/2000/svg";
const draw = (name, attributes = {}, ...children) => {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
};
const GAP = 24; // between two panels, with the name of the lower one in it
const STATES = { healthy: 0.2, warning: 0.6, danger: 1 }; // height of the strip: no meaning rests on colour alone

function short(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return value.toExponential(0).replace("e+", "e");
  return value.toLocaleString("en", { maximumSignificantDigits: 3 });
}

function ticksOf(low, high, isLog, most) {
  if (isLog) {
    const decades = [];
    for (let at = Math.ceil(Math.log10(low) - 1e-9); at <= Math.log10(high) + 1e-9; at += 1) decades.push(10 ** at);
    if (decades.length >= 2) return decades.filter((_, index) => index % Math.ceil(decades.length / most) === 0);
    const finer = [0.1, 1, 10].flatMap((by) => [1, 2, 5].map((part) => by * part * 10 ** Math.floor(Math.log10(low))));
    if (high > 5 * low) return finer.filter((tick) => tick >= low && tick <= high);
  }
  const rough = (high - low) / most || 1;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((size) => size >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) found.push(Number((at * step).toPrecision(12)));
  return found;
}

class Chart {
  constructor(figure, chart) {
    Object.assign(this, { figure, chart, plot: figure.querySelector(".plot"), at: null });
    const known = new Set(chart.marks.map((mark) => mark[0]));
    for (const panel of chart.panels) for (const line of panel.lines) if (line.kind !== "limit") line.x.forEach((x) => known.add(x));
    this.steps = [...known].sort((a, b) => a - b);
    this.range = this.everything = [this.steps[0], this.steps[this.steps.length - 1]];
    if (this.range[0] === this.range[1]) this.range = this.everything = [this.range[0] - 1, this.range[1] + 1];
    this.listen();
    new ResizeObserver(() => this.render()).observe(this.plot);
  }

  x(step) {
    const [low, high] = this.range;
    return this.left + 8 + ((step - low) / (high - low)) * (this.width - this.left - 20);
  }

  stepAt(pixel) {
    const [low, high] = this.range;
    return low + ((pixel - this.left - 8) / (this.width - this.left - 20)) * (high - low);
  }

  nearest(pixel) {
    const goal = this.stepAt(pixel);
    return this.steps.reduce((best, step) => (Math.abs(step - goal) < Math.abs(best - goal) ? step : best));
  }

  visible(line) {
    const [low, high] = this.range;
    const inside = line.x.map((x, i) => [x, line.y[i], i]).filter(([x]) => x >= low && x <= high);
    if (!inside.length) return [];
    const [first, last] = [inside[0][2], inside[inside.length - 1][2]];
    const from = Math.max(first - 1, 0); // one neighbour on either side, so that lines leave the panel
    return line.x.slice(from, last + 2).map((x, i) => [x, line.y[from + i]]);
  }

  render() {
    const width = Math.round(this.plot.clientWidth);
    if (width < 120) return;
    Object.assign(this, { width, left: width > 500 ? 64 : 46 });
    const isMany = this.chart.panels.length > 1;
    const top = this.chart.bands.length ? 24 : 10;
    let y = top;
    this.panels = this.chart.panels.map((panel, index) => {
      const height = index ? 54 : Math.max(190, Math.min(width * 0.22, 250));
      const made = { ...panel, top: y, height };
      y += height + (isMany ? GAP : 0);
      return made;
    });
    this.bottom = y - (isMany ? GAP : 0);
    const svg = draw("svg", { viewBox: `0 0 ${width} ${this.bottom + 40}`, width, height: this.bottom + 40 });
    for (const step of ticksOf(...this.range, false, width > 500 ? 9 : 4).filter(Number.isInteger)) {
      svg.append(draw("line", { class: "grid", x1: this.x(step), x2: this.x(step), y1: top, y2: this.bottom }));
      svg.append(this.text(this.x(step), this.bottom + 17, step.toLocaleString("en"), "middle"));
    }
    svg.append(this.text((this.left + width) / 2, this.bottom + 34, "training step", "middle"));
    this.bands(svg, top);
    this.panels.forEach((panel, index) => this.panel(svg, panel, index));
    this.marks(svg, this.panels[0]);
    this.cursor = draw("g", { class: "cursor" });
    this.frame = draw("rect", { class: "selection", y: top, height: this.bottom - top, visibility: "hidden" });
    svg.append(this.frame, this.cursor);
    this.plot.replaceChildren(svg);
    this.svg = svg;
    this.figure.querySelector(".whole").hidden = this.range === this.everything;
    this.point(this.at);
  }

  text(x, y, words, anchor = "start", kind = "axis") {
    return draw("text", { class: kind, x: x.toFixed(1), y: y.toFixed(1), "text-anchor": anchor }, words);
  }

  bands(svg, top) {
    const [low, high] = this.range;
    for (const [first, last, state, note] of this.chart.bands) {
      const [left, right] = [Math.max(first - 0.5, low), Math.min(last + 0.5, high)].map((step) => this.x(step));
      if (right <= left) continue;
      const height = 12 * STATES[state];
      const part = draw("rect", { class: `state ${state}`, x: left.toFixed(1), width: (right - left).toFixed(1), y: top - 6 - height, height });
      if (note) {
        part.classList.add("noted");
        for (const [key, value] of Object.entries({ tabindex: 0, role: "img", "aria-label": note })) part.setAttribute(key, value);
        part.append(draw("title", {}, note));
      }
      svg.append(part);
    }
  }

  panel(svg, panel, index) {
    const shown = panel.lines.map((line) => this.visible(line).filter(([, y]) => !panel.is_log || y > 0));
    const values = shown.flat().map(([, y]) => y);
    if (!index) for (const [step, norm] of this.chart.marks) if (norm > 0 && step >= this.range[0] && step <= this.range[1]) values.push(norm);
    let low = values.reduce((a, b) => Math.min(a, b), Infinity);
    let high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!values.length) [low, high] = [1, 10];
    const scale = panel.is_log ? Math.log10 : (value) => value;
    const room = (scale(high) - scale(low)) * 0.1 || (panel.is_log ? 0.3 : Math.abs(high) * 0.1 || 1);
    const [bottom, top] = [scale(low) - room, scale(high) + room];
    panel.y = (value) => panel.top + panel.height - ((scale(value) - bottom) / (top - bottom)) * panel.height;
    const back = panel.is_log ? (value) => 10 ** value : scale;
    for (const tick of ticksOf(back(bottom), back(top), panel.is_log, index ? 2 : 5)) {
      const y = panel.y(tick);
      svg.append(draw("line", { class: "grid", x1: this.left, x2: this.width, y1: y, y2: y }));
      svg.append(this.text(this.left - 6, y + 4, short(tick), "end"));
    }
    const clip = `clip-${index}`;
    svg.append(draw("clipPath", { id: clip }, draw("rect", { x: this.left, y: panel.top - 4, width: this.width - this.left, height: panel.height + 8 })));
    shown.forEach((points, at) => {
      if (!points.length) return;
      const path = points.map(([x, y], i) => `${i ? "L" : "M"}${this.x(x).toFixed(1)} ${panel.y(y).toFixed(1)}`).join("");
      svg.append(draw("path", { class: `line ${panel.lines[at].kind}`, d: path, "clip-path": `url(#${clip})` }));
      if (points.length === 1) svg.append(draw("circle", { class: `dot ${panel.lines[at].kind}`, cx: this.x(points[0][0]), cy: panel.y(points[0][1]), r: 2.5 }));
    });
    svg.append(this.text(this.left + 4, panel.top + (index ? -6 : 13), panel.title, "start", "axis name"));
  }

  marks(svg, panel) {
    for (const [step, norm, id] of this.chart.marks) {
      if (step < this.range[0] || step > this.range[1]) continue;
      const [x, y] = [this.x(step), norm > 0 ? panel.y(norm) : panel.top + 2];
      const shape = norm > 0 ? `M${x} ${y - 6}l6 6l-6 6l-6 -6z` : `M${x - 6} ${y - 5}h12l-6 10z`;
      const link = draw("a", { href: `#event-${id}`, tabindex: -1, "aria-label": `event at step ${step}` });
      link.append(draw("path", { class: "mark", d: shape }), draw("title", {}, `step ${step}: ${norm === null ? "not finite" : short(norm)}, select to open`));
      svg.append(link);
    }
  }

  // The keys above the curve say what each line is, and its value at the step that is pointed at.
  point(step) {
    this.at = step;
    this.cursor.replaceChildren();
    const entries = [];
    for (const [index, panel] of this.panels.entries()) {
      for (const line of panel.lines) {
        let value = null;
        if (step !== null) {
          const at = line.kind === "limit" ? line.x.filter((x) => x <= step).length - 1 : line.x.indexOf(step);
          value = at >= 0 ? line.y[at] : null;
          if (value !== null && (!panel.is_log || value > 0)) this.cursor.append(draw("circle", { class: `dot ${line.kind}`, cx: this.x(step), cy: panel.y(value), r: 3.5 }));
        }
        if (!index || step !== null) entries.push([line.label, value, line.kind]);
      }
    }
    if (step !== null) this.cursor.prepend(draw("line", { x1: this.x(step), x2: this.x(step), y1: this.panels[0].top, y2: this.bottom }));
    if (step === null && this.chart.marks.length) entries.push(["event", null, "mark"]);
    const keys = entries.map(([label, value, kind]) => make("span", { className: `key ${kind}` }, label, ...(value === null ? [] : [make("b", { textContent: ` ${plain(value)}` })])));
    if (step !== null) keys.unshift(make("b", { className: "step", textContent: `step ${step.toLocaleString("en")}` }));
    this.figure.querySelector(".keys").replaceChildren(...keys);
    const said = entries.filter(([, value]) => value !== null).map(([label, value]) => `${label} ${plain(value)}`);
    this.figure.querySelector(".readout").textContent = step === null ? "" : `step ${step}: ${said.join(", ")}`;
  }

  zoom(low, high) {
    const [first, last] = this.everything;
    const wide = Math.max(high - low, 2);
    const middle = (low + high) / 2;
    const range = [Math.max(middle - wide / 2, first), Math.min(middle + wide / 2, last)];
    this.range = range[0] <= first && range[1] >= last ? this.everything : range;
    this.render();
  }

  listen() {
    const { plot } = this;
    let start = null;
    const place = (event) => event.clientX - plot.getBoundingClientRect().left;
    plot.addEventListener("pointerdown", (event) => {
      if (event.button || event.target.closest("a")) return;
      start = place(event);
      plot.setPointerCapture(event.pointerId);
    });
    plot.addEventListener("pointermove", (event) => {
      const at = place(event);
      this.point(this.nearest(at));
      if (start === null) return;
      this.frame.setAttribute("x", Math.min(start, at));
      this.frame.setAttribute("width", Math.abs(at - start));
      this.frame.setAttribute("visibility", "visible");
    });
    plot.addEventListener("pointerup", (event) => {
      const [from, to] = [start, place(event)];
      start = null;
      this.frame.setAttribute("visibility", "hidden");
      if (from !== null && Math.abs(to - from) > 8) this.zoom(...[this.stepAt(from), this.stepAt(to)].sort((a, b) => a - b));
    });
    plot.addEventListener("pointercancel", () => { start = null; this.frame.setAttribute("visibility", "hidden"); });
    plot.addEventListener("pointerleave", () => start === null && this.point(null));
    plot.addEventListener("dblclick", () => this.zoom(...this.everything));
    this.figure.querySelector(".whole").addEventListener("click", () => this.zoom(...this.everything));
    plot.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { steps } = this;
    const [low, high] = this.range;
    const inside = steps.filter((step) => step >= low && step <= high);
    const at = this.at === null ? -1 : inside.indexOf(this.at);
    const middle = this.at ?? (low + high) / 2;
    const mark = this.chart.marks.find(([step]) => step === this.at);
    const act = {
      ArrowRight: () => this.point(inside[Math.min(at + 1, inside.length - 1)] ?? null),
      ArrowLeft: () => this.point(inside[Math.max(at - 1, 0)] ?? null),
      "+": () => this.zoom(middle - (high - low) / 4, middle + (high - low) / 4),
      "-": () => this.zoom(middle - (high - low), middle + (high - low)),
      0: () => this.zoom(...this.everything),
      Enter: mark && (() => { location.hash = `#event-${mark[2]}`; }),
    }[event.key === "=" ? "+" : event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }
}

for (const figure of all(document, "figure.chart")) {
  const chart = data.charts[figure.dataset.chart];
  if (chart) new Chart(figure, chart);
}
