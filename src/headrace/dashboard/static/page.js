// The page over some runs: what the live page and the report have in common.
import { el, swatch } from "./dom.js";
import { bytes, metric, number, plural, seconds } from "./format.js";
import { LineChart, View } from "./lines.js";
import { packing, plane, routes } from "./plane.js";
import { Samples } from "./samples.js";
import { below, strip, timeLine } from "./time.js";

const RUN_COLOURS = ["#4477aa", "#e5606f", "#228833", "#ccaa33", "#aa3377", "#56b4d3", "#ee8866", "#8c8c8c"];
const RESULTS = [
  ["validation/accuracy", "greedy accuracy", "validations"],
  ["validation/sampled_accuracy", "sampled accuracy", "validations"],
  ["validation/reward", "greedy reward", "validations"],
  ["validation/sampled_reward", "sampled reward", "validations"],
  ["reward/mean", "reward", "steps"],
  ["mismatch/generation_kl", "KL of generator and trainer", "steps", true],
  ["router_replay/route_exact", "routes that agree", "steps", true],
  ["rollout/tokens_per_s", "generated tokens/s", "steps"],
  ["async/lag_mean", "lag of samples, steps", "steps"],
];
const LAST = 20;

export class Page {
  // `source.find(run, query)` finds samples; `source.note` stands at the end of the page.
  constructor(about, source) {
    this.about = about;
    this.source = source;
    this.runs = new Map();
    this.shown = [];
    this.view = new View();
    this.view.extent = () => this.shown.flatMap((run) => [this.data(run).steps.steps, this.data(run).validations.steps]);
    this.view.told = (chart) => this.tell(chart);
    this.sections = {};
    this.charts = [];
    this.spoken = el("p", { class: "hidden", "aria-live": "polite" });
  }

  data(run) { return this.runs.get(run); }
  get focus() { return this.data(this.focused) ? this.focused : this.shown[0]; }
  // Steps that a point of a long run stands for.
  get every() { return Math.max(1, ...this.shown.map((run) => this.data(run).steps.every ?? 1)); }
  get isCompared() { return this.shown.length > 1; }
  colour(run) { return RUN_COLOURS[this.shown.indexOf(run) % RUN_COLOURS.length]; }
  colourOf(name) { return this.data(this.focus)?.colours[name] ?? this.about.colours[name] ?? "#888888"; }

  mount(top) {
    const names = [["overview", "Overview"], ["curves", "Curves"], ["time", "Time"], ["plane", "Data plane"], ["packing", "Packing"],
      ["routes", "Routes"], ["samples", "Samples"], ["recipe", "Recipe"]];
    this.links = {};
    const nav = el("nav", { "aria-label": "Parts of the page" }, names.map(([id, title]) => (this.links[id] = el("a", { href: `#${id}` }, title))));
    const main = el("main", {}, names.map(([id, title]) => {
      this.sections[id] = el("div", { class: "body" });
      return el("section", { id, "aria-label": title }, id === "overview" ? null : el("h2", {}, title), this.sections[id]);
    }), this.missing = el("p", { class: "note missing" }), this.source.note ? el("p", { class: "note" }, this.source.note) : null, this.spoken);
    document.body.replaceChildren(top, nav, main);
    this.curves();
    this.rebuild();
  }

  // All that stands for the shown runs, made anew.
  rebuild() {
    this.samples = null;
    this.sections.samples.replaceChildren();
    this.recipe();
    this.refresh();
  }

  // What news change.
  refresh() {
    if (!this.shown.length) { this.empty(); return; }
    const absent = [];
    this.overview();
    this.sayAverage();
    for (const chart of this.charts) {
      // A chart that stands in for another: rewards of a validation where there are no verdicts.
      const other = this.charts.find((one) => one.title === chart.instead);
      chart.isSpared = Boolean(other && !other.node.hidden);
      chart.node.hidden = chart.isSpared || !chart.drawn.length;
    }
    this.view.redraw();
    absent.push(...this.charts.filter((chart) => chart.node.hidden && chart.writtenBy && !chart.isSpared)
      .map((chart) => [chart.title, chart.writtenBy]));
    this.more();
    this.inside(absent);
    this.showSamples(absent);
    if (!this.shown.some((run) => this.data(run).step)) {
      this.missing.replaceChildren("Everything else comes with the first step.");
      return;
    }
    this.missing.replaceChildren(absent.length ? "Not drawn, since the run has not written it: " : "",
      ...absent.flatMap(([what, key], at) => [at ? "; " : "", `${what} (`, el("code", {}, key), ")"]), absent.length ? "." : "");
  }

  empty() {
    this.sections.overview.replaceChildren(el("p", { class: "note" }, "No run is chosen."));
    for (const id of Object.keys(this.sections)) this.hide(id, id !== "overview");
    this.missing.replaceChildren();
  }

  hide(id, isHidden) {
    this.sections[id].parentElement.hidden = isHidden;
    this.links[id].hidden = isHidden;
  }

  fill(id, children) {
    const shown = children.filter(Boolean);
    this.sections[id].replaceChildren(...shown);
    this.hide(id, !shown.length);
  }

  // Overview: figures of one run, or a table of several.

  overview() {
    this.fill("overview", [this.isCompared ? this.results() : el("dl", { class: "tiles" }, this.figures(this.shown[0]).map(([name, value, about]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, value), about ? el("dd", { class: "small" }, about) : null)))]);
  }

  figures(run) {
    const data = this.data(run), total = data.recipe["grpo.max_num_steps"], times = stepSeconds(data.steps);
    const recent = times.slice(-LAST), each = recent.reduce((a, b) => a + b, 0) / (recent.length || 1);
    const now = data.state === "running" && data.detail.begun ? `${data.detail.begun.stage} of step ${data.detail.begun.step}` : "";
    const found = [["Step", total ? `${data.step.toLocaleString("en-US")} of ${total.toLocaleString("en-US")}` : number(data.step), now || stateOf(data)]];
    if (!data.step && data.phases.steps.length) found[0] = ["Warm start", plural(data.phases.steps.at(-1), "step"), stateOf(data)];
    for (const [name, title, of] of this.wanted().filter(([, , , isMinor]) => !isMinor)) {
      const values = present(data[of].values[name]);
      if (values.length) found.push([title, metric(name, values.at(-1)), of === "validations" && values.length > 1 ? `${metric(name, values[0])} before` : ""]);
    }
    const lost = present(data.steps.values["async/failed_calls"]).reduce((a, b) => a + b, 0);
    if (lost) found.push(["Failed calls", number(lost), "made again"]);
    if (recent.length) found.push(["A step", seconds(each), `mean of the last ${recent.length}`]);
    if (data.state === "running" && total && recent.length && total > data.step) found.push(["Left", seconds((total - data.step) * each), ""]);
    return found;
  }

  // Results without rewards of validations where there are verdicts.
  wanted() {
    const hasVerdicts = this.shown.some((run) => "validation/accuracy" in this.data(run).validations.values);
    return RESULTS.filter(([name]) => !hasVerdicts || !/^validation.*reward$/.test(name));
  }

  results() {
    const rows = this.wanted().filter(([name, , of]) => this.shown.some((run) => present(this.data(run)[of].values[name]).length));
    const head = el("tr", {}, el("th", { scope: "col" }, "run"), el("th", { scope: "col" }, "step"), rows.map(([, title]) => el("th", { scope: "col" }, title)), el("th", { scope: "col" }, "a step"));
    const found = this.shown.map((run) => {
      const data = this.data(run), times = stepSeconds(data.steps).slice(-LAST);
      const values = rows.map(([name, , of]) => {
        const all = present(data[of].values[name]);
        return of === "validations" ? [all.at(-1), all.length > 1 ? all[0] : undefined] : [mean(all.slice(-LAST))];
      });
      return { run, data, values, each: mean(times) };
    });
    const body = found.map(({ run, data, values, each }) => el("tr", {}, el("th", { scope: "row" }, swatch(this.colour(run)), data.name), el("td", {}, number(data.step)),
      rows.map(([name], at) => el("td", {}, metric(name, values[at][0]),
        values[at][1] === undefined ? null : el("span", { class: "small" }, ` from ${metric(name, values[at][1])}`))),
      el("td", {}, each === undefined ? "–" : seconds(each))));
    return el("div", { class: "card" },
      el("div", { class: "scroll" }, el("table", { class: "plain wide" }, el("caption", { class: "hidden" }, "Results"), el("thead", {}, head),
        el("tbody", {}, body, found.length === 2 ? this.difference(found, rows) : null))),
      el("p", { class: "note" }, `Held-out results are the last ones; all others are means of the last ${LAST} steps.`));
  }

  // The second of two runs less the first.
  difference([first, second], rows) {
    const signed = (value, said) => (value === undefined || Number.isNaN(value) ? "–" : (value < 0 ? "−" : "+") + said(Math.abs(value)));
    return el("tr", { class: "difference" }, el("th", { scope: "row" }, "difference"), el("td", {}, signed(second.data.step - first.data.step, number)),
      rows.map(([name], at) => el("td", {}, signed(second.values[at][0] - first.values[at][0], (value) => metric(name, value).replace(" %", " points")))),
      el("td", {}, signed(second.each - first.each, seconds)));
  }

  // Curves.

  curves() {
    const { view } = this;
    const about = el("output", {}), say = () => { about.textContent = averageOf(view.weight, this.every); };
    this.sayAverage = say;
    const slider = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: view.weight, "aria-label": "Smoothing", on: { input: (event) => {
      view.weight = Number(event.target.value);
      say();
      view.redraw();
    } } });
    const bound = (at, label) => el("input", { type: "number", "aria-label": label, placeholder: at ? "last" : "first", on: { change: () => this.zoom() } });
    this.bounds = [bound(0, "First step shown"), bound(1, "Last step shown")];
    const tools = el("div", { class: "filters" }, el("label", {}, el("span", {}, "Smoothing"), slider, about),
      el("label", {}, el("span", {}, "Steps"), el("span", { class: "pair" }, this.bounds)),
      el("p", { class: "note" }, "Thin: each step; thick: the average. Drag over a chart to zoom, double-click to go back; arrow keys move the line."));
    // What a phase before the first step has made goes when training begins; it stays among all metrics.
    const isOver = (run, of) => of === "phases" && this.data(run).step > 0;
    this.charts = this.about.charts.map((chart) => this.chart(chart, isOver));
    this.extra = el("div", { class: "grid" });
    this.choice = el("input", { type: "search", placeholder: "part of a name", "aria-label": "Name of a metric", on: { input: () => this.more() } });
    this.all = el("details", { class: "all", on: { toggle: () => this.more() } }, el("summary", {}, "All metrics"),
      el("div", { class: "filters" }, el("label", {}, el("span", {}, "Name"), this.choice)), this.extra);
    this.others = new Map();
    this.sections.curves.append(tools, el("div", { class: "grid" }, this.charts.map((chart) => chart.node)), this.all);
  }

  chart({ title, names, labels, of, key, instead, is_rare: isRare }, isOver = () => false) {
    const lines = () => {
      const found = this.shown.filter((run) => !isOver(run, of))
        .flatMap((run) => names.map((name, at) => this.line(run, of, name, names.length > 1 ? labels[at] : "", at > 0)).filter(Boolean));
      return isRare && !found.some((line) => line.values.some(Boolean)) ? [] : found;
    };
    const chart = new LineChart(this.view, title, lines, names.map((name) => `${name}: ${this.meaning(name)}`).join("\n"));
    Object.assign(chart, { writtenBy: key, instead });
    return chart;
  }

  line(run, of, name, label, isSecond) {
    const data = this.data(run), table = data[of];
    if (!table?.values[name]) return null;
    return {
      run, name, steps: table.steps, values: table.values[name], low: table.low?.[name], high: table.high?.[name],
      isSparse: of === "validations", isApart: of === "phases", label: this.isCompared ? [data.name, label].filter(Boolean).join(" ") : label,
      colour: this.isCompared ? this.colour(run) : this.colourOf(name), dash: this.isCompared && isSecond,
    };
  }

  meaning(name) {
    const known = this.about.meanings;
    if (name in known) return known[name];
    const fits = (pattern) => new RegExp(`^${pattern.split("*").map((part) => part.replace(/[.+?^${}()|[\]\\]/g, "\\$&")).join(".*")}$`).test(name);
    return known[Object.keys(known).filter((pattern) => pattern.includes("*") && fits(pattern)).sort((a, b) => b.length - a.length)[0]] ?? "";
  }

  // A chart for each metric, once one asks for them.
  more() {
    if (!this.all.open) return;
    const wanted = this.choice.value.trim().toLowerCase();
    const names = new Map();
    for (const run of this.shown) {
      for (const of of ["steps", "validations", "phases"]) {
        for (const name of Object.keys(this.data(run)[of].values)) if (name.toLowerCase().includes(wanted)) names.set(name, of);
      }
    }
    for (const [name, of] of names) {
      if (!this.others.has(name)) this.others.set(name, this.chart({ title: name, names: [name], labels: [""], of }));
    }
    for (const [name, chart] of this.others) {
      if (names.has(name)) { this.view.charts.add(chart); continue; }
      this.view.charts.delete(chart);
    }
    const nodes = [...names.keys()].sort().map((name) => this.others.get(name).node);
    if (nodes.length !== this.extra.childNodes.length || nodes.some((node, at) => node !== this.extra.childNodes[at])) this.extra.replaceChildren(...nodes);
  }

  zoom() {
    const [first, last] = this.bounds.map((input) => (input.value === "" ? null : Number(input.value)));
    const known = this.view.extent().filter((steps) => steps.length);
    const whole = [Math.min(...known.map((steps) => steps[0])), Math.max(...known.map((steps) => steps.at(-1)))];
    const range = [first ?? whole[0], last ?? whole[1]];
    this.view.range = (first === null && last === null) || !(range[0] < range[1]) ? null : range;
    this.view.redraw();
    this.strips?.forEach((one) => one.redraw());
  }

  tell(chart) {
    const { range, step } = this.view;
    if (this.bounds && !this.bounds.includes(document.activeElement)) {
      this.bounds.forEach((input, at) => { input.value = range ? Math.round(range[at]) : ""; });
    }
    if (this.lastRange !== range) this.strips?.forEach((one) => one.redraw());
    this.lastRange = range;
    if (step !== null && chart?.node === document.activeElement) this.spoken.textContent = `step ${step}: ${chart.legend.textContent}`;
  }

  // Inside one run: time, plane, packing, routes.

  inside(absent) {
    const data = this.data(this.focus), { steps, detail } = data, colours = this.about.colours;
    const known = { ...colours, ...data.colours };
    const times = below(steps, "time_s/"), sizes = below(steps, "bytes/");
    const made = [];
    if (Object.keys(times).length) made.push(strip("Seconds per step", steps.steps, times, this.about.stages, known, seconds, this.view));
    if (Object.keys(sizes).length) {
      const order = Object.keys(sizes).sort((a, b) => total(sizes[b]) - total(sizes[a]));
      made.push(strip("Bytes through the data plane per step", steps.steps, sizes, order, known, bytes, this.view));
    }
    this.strips = made;
    const line = timeLine(detail, known, window.innerWidth < 600 ? 4 : 8);
    const picked = this.isCompared ? this.picker() : null;
    this.fill("time", made.length || line ? [picked, ...made.map((one) => one.node), line] : []);
    if (!line) absent.push(["Time line", "logging.detail_every"]);
    const parts = plane(detail, known);
    this.fill("plane", parts ? [el("div", { class: "cards" }, parts)] : []);
    if (!parts) absent.push(["Data plane", data.recipe["data_plane.enabled"] === false ? "data_plane.enabled" : "logging.detail_every"]);
    this.fill("packing", detail.packing.map((record) => packing(record, known)));
    if (!detail.packing.length) absent.push(["Microbatches", "logging.detail_every"]);
    const heat = routes(steps);
    this.fill("routes", [heat]);
    if (!heat) absent.push(["Routes by layer", "policy.router_replay.enabled"]);
  }

  picker() {
    return el("label", { class: "filters" }, el("span", {}, "From here on of run"), el("select", { on: { change: (event) => {
      this.focused = Number(event.target.value);
      this.samples = null;
      this.sections.samples.replaceChildren();
      this.refresh();
    } } }, this.shown.map((run) => el("option", { value: run, selected: run === this.focus }, this.data(run).name))));
  }

  showSamples(absent) {
    const run = this.focus, { samples } = this.data(run);
    this.hide("samples", !samples.count);
    if (!samples.count) { absent.push(["Samples", "logging.samples_per_step"]); return; }
    if (this.samples === null) {
      this.samples = new Samples((query) => this.source.find(run, query), samples.splits);
      this.sections.samples.replaceChildren(this.samples.node);
    } else if (this.counted !== samples.count) this.samples.grown();
    this.counted = samples.count;
  }

  // Recipes: what differs between several, or all keys of one.

  recipe() {
    // What differs stands beside the results; the recipe of one run stands at the end.
    const section = this.sections.recipe.parentElement, link = this.links.recipe;
    section.parentElement.insertBefore(section, this.isCompared ? this.sections.curves.parentElement : this.missing);
    link.parentElement.insertBefore(link, this.isCompared ? this.links.curves : null);
    const recipes = this.shown.map((run) => this.data(run).recipe);
    const keys = [...new Set(recipes.flatMap((recipe) => Object.keys(recipe)))].sort();
    const said = (value) => (value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));
    if (!keys.length) { this.fill("recipe", []); return; }
    const table = (rows) => el("div", { class: "scroll" }, el("table", { class: "plain keys" },
      this.isCompared ? el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "key"), this.shown.map((run) => el("th", { scope: "col" }, swatch(this.colour(run)), this.data(run).name)))) : null,
      el("tbody", {}, rows.map((key) => el("tr", {}, el("th", { scope: "row" }, key), recipes.map((recipe) => el("td", {}, said(recipe[key]))))))));
    if (this.isCompared) {
      // Each run has a directory of its own.
      const differing = keys.filter((key) => key !== "run_dir" && new Set(recipes.map((recipe) => said(recipe[key]))).size > 1);
      const title = differing.length ? `${plural(differing.length, "key")} of the recipes ${differing.length === 1 ? "differs" : "differ"}` : "The recipes are the same";
      this.fill("recipe", [el("div", { class: "card" }, el("h3", {}, title), differing.length ? table(differing) : null)]);
      return;
    }
    this.fill("recipe", [el("details", { class: "card" }, el("summary", {}, `${plural(keys.length, "key")} of config.yaml`), table(keys))]);
  }
}

function averageOf(weight, every) {
  return weight === 0 ? "none" : `average of about ${plural(Math.round(every / (1 - weight)), "step")}`;
}

function stateOf(data) {
  return { running: "running", finished: "finished", stopped: "stopped before its end" }[data.state];
}

function present(values) {
  return (values ?? []).filter((value) => value !== null && value !== undefined);
}

function mean(values) {
  return values.length ? total(values) / values.length : undefined;
}

function total(values) {
  return values.reduce((sum, value) => sum + (value ?? 0), 0);
}

function stepSeconds(table) {
  const parts = Object.values(below(table, "time_s/"));
  return parts.length ? table.steps.map((_, at) => parts.reduce((sum, values) => sum + (values[at] ?? 0), 0)) : [];
}

// Rows that have come go to the end of a table; a name that comes late has had no values before.
export function append(table, rows) {
  const before = table.steps.length;
  table.steps.push(...rows.steps);
  for (const name of new Set([...Object.keys(table.values), ...Object.keys(rows.values)])) {
    const values = (table.values[name] ??= Array(before).fill(null));
    values.push(...(rows.values[name] ?? Array(rows.steps.length).fill(null)));
  }
}
