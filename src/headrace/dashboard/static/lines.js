// Line charts with one hover line over all of them.
import { css, el, picture, swatch } from "./dom.js";
import { metric, number, ticks } from "./format.js";

const LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 20, HEIGHT = 168;

// What all charts share: the step under the pointer, the range of steps, the weight of the average.
export class View {
  constructor() {
    this.step = null;
    this.range = null;
    this.weight = 0.8;
    this.charts = new Set();
    this.isWaiting = false;
    this.told = () => {};
  }
  hover(step, source) {
    if (step === this.step) return;
    this.step = step;
    if (this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame(() => {
      this.isWaiting = false;
      for (const chart of this.charts) chart.mark();
      this.told(source);
    });
  }
  redraw() { for (const chart of this.charts) chart.redraw(); }
}

// The exponential moving average without the bias of its first values, as in the plots of `headrace report`.
export function smoothed(values, weight) {
  let average = 0, norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    average = weight * average + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return average / norm;
  });
}

// First place in ascending numbers that is at least `wanted`.
function place(ascending, wanted) {
  let low = 0, high = ascending.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ascending[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low;
}

export class LineChart {
  // `lines()` gives [{label, name, colour, dash, steps, values, low, high, isSparse}].
  constructor(view, title, lines, about = "") {
    this.view = view;
    this.title = title;
    this.lines = lines;
    this.cache = new Map();
    this.legend = el("div", { class: "legend" });
    this.base = picture(HEIGHT, title, (context, width, height) => this.draw(context, width, height));
    this.over = el("canvas", { class: "over", "aria-hidden": "true" });
    this.base.node.append(this.over);
    this.node = el("figure", { class: "card chart", tabindex: "0", role: "group", "aria-label": title },
      el("figcaption", { title: about }, el("h3", {}, title), this.legend), this.base.node);
    this.listen();
    view.charts.add(this);
  }

  listen() {
    const { node } = this.base;
    let from = null;
    node.addEventListener("pointermove", (event) => {
      this.view.hover(this.stepAt(event), this);
      if (from !== null) this.mark(from);
    });
    node.addEventListener("pointerleave", () => { from = null; this.view.hover(null, this); });
    node.addEventListener("pointerdown", (event) => { from = event.pointerType === "mouse" ? this.stepAt(event) : null; });
    node.addEventListener("pointerup", (event) => {
      const to = this.stepAt(event);
      if (from !== null && to !== null && Math.abs(to - from) > 1) {
        this.view.range = [Math.min(from, to), Math.max(from, to)];
        this.view.redraw();
        this.view.told(this);
      }
      from = null;
    });
    node.addEventListener("dblclick", () => { this.view.range = null; this.view.redraw(); this.view.told(this); });
    this.node.addEventListener("keydown", (event) => this.key(event));
    this.node.addEventListener("blur", () => this.view.hover(null, this));
  }

  key(event) {
    const all = this.longest();
    if (!all.length || this.isApart) return;
    const at = this.view.step === null ? all.length : place(all, this.view.step), jump = event.shiftKey ? 10 : 1;
    const targets = { ArrowLeft: at - jump, ArrowRight: at + jump, Home: 0, End: all.length - 1 };
    if (event.key === "Escape") { this.view.hover(null, this); return; }
    if (!(event.key in targets)) return;
    event.preventDefault();
    this.view.hover(all[Math.max(0, Math.min(targets[event.key], all.length - 1))], this);
  }

  longest() {
    return this.drawn.reduce((best, line) => (line.steps.length > best.length ? line.steps : best), []);
  }

  get drawn() { return this.lines().filter((line) => line.values.some((value) => value !== null)); }

  stepAt(event) {
    if (!this.scale || this.isApart) return null;
    const x = event.clientX - this.base.canvas.getBoundingClientRect().left;
    const { first, last, x0, x1 } = this.scale;
    const wanted = first + ((x - x0) / (x1 - x0)) * (last - first);
    let best = null;
    for (const { steps } of this.scale.lines) {
      const after = place(steps, wanted);
      for (const at of [after - 1, after]) {
        if (at in steps && (best === null || Math.abs(steps[at] - wanted) < Math.abs(best - wanted))) best = steps[at];
      }
    }
    return best;
  }

  average(line) {
    if (line.isSparse || this.view.weight === 0) return line.values;
    const key = `${line.run}/${line.name}`, known = this.cache.get(key);
    const last = line.values.length;
    if (known && known.of === line.values && known.last === last && known.weight === this.view.weight) return known.values;
    const values = smoothed(line.values, this.view.weight);
    this.cache.set(key, { of: line.values, last, weight: this.view.weight, values });
    return values;
  }

  redraw() {
    this.base.redraw();
    this.mark();
  }

  draw(context, width, height) {
    const lines = this.drawn;
    // What does not count the run's steps, such as those of a warm start, has a scale of its own.
    this.isApart = lines.some((line) => line.isApart);
    const shared = this.view.range ?? span(this.view.extent ? this.view.extent() : lines.map((line) => line.steps));
    const [first, last] = this.isApart ? span(lines.map((line) => line.steps)) : shared;
    let low = Infinity, high = -Infinity;
    for (const line of lines) {
      const from = Math.max(0, place(line.steps, first)), to = place(line.steps, last + 0.5);
      for (let i = from; i < to; i += 1) {
        const value = line.values[i];
        if (value === null) continue;
        low = Math.min(low, line.low?.[i] ?? value);
        high = Math.max(high, line.high?.[i] ?? value);
      }
    }
    if (!(low <= high)) { low = 0; high = 1; }
    const pad = high > low ? (high - low) * 0.06 : Math.abs(high) * 0.1 || 0.5;
    low -= pad; high += pad;
    const x0 = LEFT, x1 = width - RIGHT, y0 = height - BOTTOM, y1 = TOP;
    const x = (step) => x0 + ((step - first) / (last - first || 1)) * (x1 - x0);
    const y = (value) => y0 - ((value - low) / (high - low)) * (y0 - y1);
    this.scale = { first, last, low, high, x0, x1, y0, y1, x, y, lines };
    grid(context, this.scale, this.lines()[0]?.name ?? "");
    context.save();
    context.beginPath();
    context.rect(x0 - 1, y1 - 4, x1 - x0 + 2, y0 - y1 + 8);
    context.clip();
    for (const line of lines) {
      const average = this.average(line), isRaw = average === line.values;
      if (!isRaw) {
        context.globalAlpha = 0.28;
        trace(context, line, line.values, this.scale, 1, true);
        context.globalAlpha = 1;
      }
      trace(context, line, average, this.scale, isRaw && !line.isSparse ? 1.2 : 2, false);
      if (line.isSparse || line.steps.length === 1) dots(context, line, this.scale);
    }
    context.restore();
    this.base.canvas.setAttribute("aria-label", this.inWords(lines));
    this.tell();
  }

  inWords(lines) {
    const parts = lines.map((line) => {
      const present = line.values.filter((value) => value !== null);
      const from = metric(line.name, present[0]), to = metric(line.name, present.at(-1));
      return `${line.label}: from ${from} to ${to} in ${present.length} points`;
    });
    return `${this.title}. ${parts.join("; ") || "no points yet"}`;
  }

  // Values in the legend: at the step under the hover line, or the last ones.
  tell() {
    const rows = this.drawn.map((line) => {
      const step = this.isApart ? null : this.view.step, at = step === null ? line.steps.length - 1 : nearest(line.steps, step);
      let value = at === null ? null : line.values[at];
      if (step === null && value === null) value = line.values.findLast((other) => other !== null) ?? null;
      return el("span", { class: "entry" }, swatch(line.colour, line.dash), line.label ? `${line.label} ` : "",
        el("b", {}, metric(line.name, value)));
    });
    this.legend.replaceChildren(...rows);
  }

  mark(from = null) {
    const { canvas, width, height } = this.base, ratio = window.devicePixelRatio || 1;
    if (!this.scale || !width) return;
    if (this.over.width !== canvas.width || this.over.height !== canvas.height) {
      this.over.width = canvas.width;
      this.over.height = canvas.height;
      this.over.style.height = `${height}px`;
    }
    const context = this.over.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const { first, last, x, y, y0, y1, lines } = this.scale, { step } = this.view;
    this.tell();
    if (step === null || this.isApart || step < first || step > last) return;
    if (from !== null) {
      context.fillStyle = css("--accent");
      context.globalAlpha = 0.15;
      context.fillRect(x(from), y1, x(step) - x(from), y0 - y1);
      context.globalAlpha = 1;
    }
    context.strokeStyle = css("--muted");
    context.beginPath();
    context.moveTo(Math.round(x(step)) + 0.5, y1);
    context.lineTo(Math.round(x(step)) + 0.5, y0);
    context.stroke();
    for (const line of lines) {
      const at = nearest(line.steps, step), value = at === null ? null : this.average(line)[at];
      if (value === null) continue;
      context.fillStyle = line.colour;
      context.beginPath();
      context.arc(x(line.steps[at]), y(value), 3, 0, 7);
      context.fill();
    }
    context.fillStyle = css("--muted");
    context.font = `11px ${css("--font")}`;
    context.textAlign = x(step) > width / 2 ? "right" : "left";
    context.fillText(`step ${step.toLocaleString("en-US")}`, x(step) + (x(step) > width / 2 ? -5 : 5), y1 + 8);
  }
}

// The place of the value that holds at a step: of that step, or of the one before.
function nearest(steps, step) {
  const at = place(steps, step + 0.5) - 1;
  return at >= 0 ? at : null;
}

export function span(parts) {
  let first = Infinity, last = -Infinity;
  for (const steps of parts) {
    if (!steps.length) continue;
    first = Math.min(first, steps[0]);
    last = Math.max(last, steps.at(-1));
  }
  return first <= last ? [first, Math.max(last, first + 1)] : [0, 1];
}

export function grid(context, { first, last, low, high, x0, x1, y0, y1, x, y }, name, format = short) {
  context.strokeStyle = css("--grid");
  context.fillStyle = css("--muted");
  context.lineWidth = 1;
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (const value of ticks(low, high, Math.max(2, Math.floor((y0 - y1) / 34)))) {
    const at = Math.round(y(value)) + 0.5;
    if (at > y0 + 1 || at < y1 - 1) continue;
    context.beginPath();
    context.moveTo(x0, at);
    context.lineTo(x1, at);
    context.stroke();
    context.fillText(format(name, value), x0 - 6, at);
  }
  context.textBaseline = "top";
  for (const step of ticks(first, last, Math.max(2, Math.floor((x1 - x0) / 90)), true)) {
    const at = x(step);
    context.textAlign = at > x1 - 14 ? "right" : at < x0 + 6 ? "left" : "center";
    context.fillText(step.toLocaleString("en-US"), at, y0 + 6);
  }
}

function short(name, value) {
  if (metric(name, 1).endsWith("%")) return `${Number((100 * value).toPrecision(4))} %`;
  const size = Math.abs(value);
  return size >= 1e6 ? `${value / 1e6}M` : size >= 1e4 ? `${value / 1e3}k` : number(value);
}

// One stroke per line; where there are more points than pixels, the lowest and the highest of each pixel.
function trace(context, line, values, { first, last, x, y }, width, spread) {
  const { steps } = line;
  const from = Math.max(0, place(steps, first) - 1), to = Math.min(steps.length, place(steps, last) + 1);
  const isDense = to - from > 2 * Math.abs(x(last) - x(first));
  context.strokeStyle = line.colour;
  context.lineWidth = width;
  context.lineJoin = "round";
  context.setLineDash(line.dash ? [5, 4] : []);
  context.beginPath();
  let isOpen = false, column = null, low = 0, high = 0, lastY = 0;
  const point = (px, py) => { if (isOpen) context.lineTo(px, py); else context.moveTo(px, py); isOpen = true; };
  const flush = () => { if (column !== null) { point(column, high); context.lineTo(column, low); context.lineTo(column, lastY); } };
  for (let i = from; i < to; i += 1) {
    const value = values[i];
    if (value === null || value === undefined) continue;
    const px = x(steps[i]), py = y(value);
    if (spread && line.low?.[i] !== undefined && line.low[i] !== null) {
      point(px, y(line.low[i]));
      point(px, y(line.high[i]));
    } else if (!isDense) point(px, py);
    else if (Math.round(px) === column) { low = Math.max(low, py); high = Math.min(high, py); lastY = py; }
    else { flush(); column = Math.round(px); low = high = lastY = py; }
  }
  flush();
  context.stroke();
  context.setLineDash([]);
}

function dots(context, line, { first, last, x, y }) {
  context.fillStyle = line.colour;
  for (let i = 0; i < line.steps.length; i += 1) {
    if (line.values[i] === null || line.steps[i] < first || line.steps[i] > last) continue;
    context.beginPath();
    context.arc(x(line.steps[i]), y(line.values[i]), 2.5, 0, 7);
    context.fill();
  }
}
