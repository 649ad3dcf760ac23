// Where the time goes: stages per step as a stacked strip, and the last steps as a time line.
import { css, el, picture, swatch, tooltip } from "./dom.js";
import { percent, seconds } from "./format.js";
import { grid, span } from "./lines.js";

const LEFT = 52, RIGHT = 10;
const LANE = 22, GAP = 6, HEAD = 16;

// Names with values in a table of steps, below a prefix: {stage: [...]}.
export function below(table, prefix) {
  const found = Object.entries(table.values).filter(([name]) => name.startsWith(prefix));
  return Object.fromEntries(found.map(([name, values]) => [name.slice(prefix.length), values]));
}

// Stacked areas of at most one bar per two pixels: a long run is averaged over equal spans of steps.
export function strip(title, steps, parts, order, colours, format, view) {
  const names = [...order.filter((name) => name in parts), ...Object.keys(parts).filter((name) => !order.includes(name))];
  let bars = [];
  const made = picture(150, title, draw);
  function draw(context, width, height) {
    const x0 = LEFT, x1 = width - RIGHT, y0 = height - 20, y1 = 8;
    const [first, last] = view.range ?? span([steps]);
    const shown = steps.map((step, at) => at).filter((at) => steps[at] >= first && steps[at] <= last);
    const each = Math.max(1, Math.ceil(shown.length / Math.max(1, (x1 - x0) / 2)));
    bars = [];
    for (let from = 0; from < shown.length; from += each) {
      const of = shown.slice(from, from + each);
      const sums = names.map((name) => of.reduce((sum, at) => sum + (parts[name][at] ?? 0), 0) / of.length);
      bars.push({ first: steps[of[0]], last: steps[of.at(-1)], sums, total: sums.reduce((a, b) => a + b, 0) });
    }
    // One slow step (a checkpoint, a validation) may be cut, so that the others can be seen.
    const totals = bars.map((bar) => bar.total).sort((a, b) => a - b);
    const high = Math.min(totals.at(-1) ?? 1, 2.5 * (totals[Math.floor(totals.length * 0.9)] ?? 1)) * 1.04 || 1;
    const x = (place) => x0 + (place / Math.max(1, bars.length)) * (x1 - x0);
    const y = (value) => y0 - (Math.min(value, high) / high) * (y0 - y1);
    const stepX = (step) => x0 + ((step - first + 0.5) / (last - first + 1)) * (x1 - x0);
    grid(context, { first, last, low: 0, high, x0, x1, y0, y1, x: stepX, y }, "", (_, value) => (value ? format(value).replace(".00 ", " ") : "0"));
    bars.forEach((bar, at) => {
      let sum = 0;
      const left = x(at), right = x(at + 1), gap = right - left > 4 ? 1 : 0;
      names.forEach((name, place) => {
        if (!bar.sums[place]) return;
        context.fillStyle = colours[name] ?? "#888";
        const top = y(sum + bar.sums[place]);
        context.fillRect(left, top, right - left - gap, y(sum) - top);
        sum += bar.sums[place];
      });
      bar.x0 = left;
      bar.x1 = right;
    });
  }
  tooltip(made, (x) => {
    const bar = bars.find((one) => x >= one.x0 && x < one.x1);
    if (!bar) return null;
    const head = bar.first === bar.last ? `step ${bar.first}` : `steps ${bar.first} to ${bar.last}, mean`;
    const rows = names.map((name, at) => [name, bar.sums[at]]).filter(([, value]) => value).reverse();
    return [`${head}: ${format(bar.total)}`, ...rows.map(([name, value]) => `${name}  ${format(value)}`)].join("\n");
  });
  const sums = names.map((name) => parts[name].reduce((sum, value) => sum + (value ?? 0), 0));
  const all = sums.reduce((a, b) => a + b, 0);
  const words = names.map((name, at) => `${name} ${percent(sums[at] / all, 0)}`).join(", ");
  made.canvas.setAttribute("aria-label", `${title}: ${words}`);
  const legend = el("div", { class: "legend" }, names.map((name, at) =>
    el("span", { class: "entry" }, swatch(colours[name] ?? "#888"), `${name} `, el("b", {}, percent(sums[at] / all)))));
  const node = el("figure", { class: "card" }, el("figcaption", {}, el("h3", {}, title), legend), made.node);
  return { node, redraw: made.redraw };
}

// Spans of the last steps, a lane per track: who works when, and who waits.
export function timeLine(detail, colours, most) {
  // Step 0 is a validation before the first.
  const steps = [...new Set(detail.spans.map((one) => one.step))].filter((step) => step > 0).slice(-most);
  const own = detail.spans.filter((one) => steps.includes(one.step)), within = own.filter((one) => !one.beside);
  if (!within.length) return null;
  const start = Math.min(...within.map((one) => one.start_s)), end = Math.max(...within.map((one) => one.start_s + one.seconds));
  const isBeside = own.length > within.length;
  const spans = own.flatMap((one) => {
    if (one.beside) return clipped(one, start, end);
    // Where rollouts go on beside the steps, new weights are only laid out for them.
    const tracks = isBeside && one.name === "update_weights" ? one.tracks.filter((track) => track !== "rollout") : one.tracks;
    // Operations of the store have a lane of their own.
    return [{ ...one, tracks }, ...(one.operations ?? []).map(([name, start_s, long]) => ({ step: one.step, name, tracks: ["store"], start_s, seconds: long }))];
  });
  const tracks = [...new Set(spans.flatMap((one) => one.tracks))].sort((a, b) => laneOf(a) - laneOf(b) || (a > b ? 1 : -1));
  const height = HEAD + tracks.length * (LANE + GAP) + 20;
  let drawn = [];
  const busy = tracks.map((track) => union(spans.filter((one) => one.tracks.includes(track))));
  const words = tracks.map((track, at) => `${track} works ${percent(busy[at] / (end - start), 0)} of the time`).join(", ");
  const made = picture(height, `Time line of steps ${steps[0]} to ${steps.at(-1)}: ${words}`, (context, width) => {
    const x0 = 112, x1 = width - RIGHT;
    const x = (at) => x0 + ((at - start) / (end - start || 1)) * (x1 - x0);
    context.textBaseline = "middle";
    drawn = [];
    tracks.forEach((track, lane) => {
      const top = HEAD + lane * (LANE + GAP);
      context.fillStyle = css("--sunken");
      context.fillRect(x0, top, x1 - x0, LANE);
      context.fillStyle = css("--muted");
      context.textAlign = "right";
      context.fillText(`${track} ${percent(busy[lane] / (end - start), 0)}`, x0 - 6, top + LANE / 2);
      for (const one of spans.filter((each) => each.tracks.includes(track))) {
        const left = x(one.start_s), wide = Math.max(1, x(one.start_s + one.seconds) - left);
        context.fillStyle = colours[one.name] ?? "#888";
        context.fillRect(left, top, wide, LANE);
        if (wide > context.measureText(one.name).width + 10) {
          context.fillStyle = "#fff";
          context.textAlign = "left";
          context.fillText(one.name, left + 5, top + LANE / 2 + 0.5);
        }
        drawn.push({ x0: left, x1: left + wide, y0: top, y1: top + LANE, one });
      }
    });
    context.fillStyle = css("--muted");
    context.strokeStyle = css("--muted");
    context.textAlign = "left";
    let free = 0;
    for (const step of steps) {
      const at = x(Math.min(...within.filter((one) => one.step === step).map((one) => one.start_s)));
      context.globalAlpha = 0.5;
      context.beginPath();
      context.moveTo(Math.round(at) + 0.5, 4);
      context.lineTo(Math.round(at) + 0.5, height - 18);
      context.stroke();
      context.globalAlpha = 1;
      const wide = context.measureText(`step ${step}`).width;
      if (at <= free || at + 4 + wide > width) continue;
      context.fillText(`step ${step}`, at + 4, 8);
      free = at + wide + 12;
    }
    context.textAlign = "right";
    context.fillText(seconds(end - start), x1, height - 8);
  });
  tooltip(made, (x, y) => {
    const hit = drawn.findLast((one) => x >= one.x0 - 1 && x <= one.x1 + 1 && y >= one.y0 && y <= one.y1);
    return hit ? `step ${hit.one.step}, ${hit.one.name}\n${seconds(hit.one.seconds)}, from ${seconds(hit.one.start_s - start)} on` : null;
  });
  return el("figure", { class: "card" },
    el("figcaption", {}, el("h3", {}, `The last ${steps.length === 1 ? "step" : `${steps.length} steps`}: who works, who waits`)), made.node);
}

// The part of a span between two times, or nothing.
function clipped(one, start, end) {
  const from = Math.max(start, one.start_s), to = Math.min(end, one.start_s + one.seconds);
  return to > from ? [{ ...one, start_s: from, seconds: to - from }] : [];
}

function laneOf(track) {
  const order = ["rollout", "collector", "store", "ranks", "rank", "driver"];
  const at = order.indexOf(track.replace(/[ -]\d+$/, ""));
  return at < 0 ? order.length : at;
}

// Seconds that are covered by spans, each counted once.
function union(spans) {
  let total = 0, until = -Infinity;
  for (const { start_s: from, seconds: long } of [...spans].sort((a, b) => a.start_s - b.start_s)) {
    total += Math.max(0, from + long - Math.max(until, from));
    until = Math.max(until, from + long);
  }
  return total;
}
