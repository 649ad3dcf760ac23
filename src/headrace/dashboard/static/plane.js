// The data plane as it is, the microbatches of the last step, and how far routes agree.
import { css, el, picture, swatch, tooltip } from "./dom.js";
import { bytes, number, percent, plural, seconds } from "./format.js";

const MOST_BINS = 240;
const LEFT_SHOWN = 3;

// A partition after each stage of the newest step: which columns are there for how many rows, and their bytes.
export function plane(detail, colours) {
  const stores = detail.stores.filter((store) => store.partitions.length);
  if (!stores.length) return null;
  const ids = [...new Set(stores.flatMap((store) => store.partitions.map((part) => part.id)))];
  return ids.map((id) => partition(id, stores, colours));
}

function partition(id, stores, colours) {
  const seen = stores.map((store) => ({ stage: store.stage, part: store.partitions.find((one) => one.id === id) }))
    .filter((one) => one.part);
  const last = seen.at(-1).part, step = stores.at(-1).step;
  const largest = Math.max(1, ...seen.flatMap(({ part }) => Object.values(part.columns).map((column) => column.bytes)));
  const names = [...new Set(seen.flatMap(({ part }) => Object.keys(part.columns)))];
  const most = Math.max(1, ...seen.map(({ part }) => part.rows));
  const head = el("tr", {}, el("th", { scope: "col" }, "column"), seen.map(({ stage }) => el("th", { scope: "col", class: "turned" }, stage)),
    el("th", { scope: "col" }, "bytes"));
  const rows = names.map((name) => {
    const peak = Math.max(...seen.map(({ part }) => part.columns[name]?.bytes ?? 0));
    return el("tr", {}, el("th", { scope: "row" }, swatch(colours[name] ?? "#888"), name),
      seen.map(({ stage, part }) => ready(part.columns[name]?.ready ?? 0, part.rows, stage, colours[name])),
      el("td", { class: "bar" }, el("span", { class: "fill", style: { "--part": peak / largest, "--colour": colours[name] ?? "#888" } }), el("span", {}, bytes(peak))));
  });
  const total = Object.values(last.columns).reduce((sum, column) => sum + column.bytes, 0);
  return el("div", { class: "card" },
    el("h3", {}, `Partition ${id}`),
    el("p", { class: "note" }, `Step ${step}, after ${seen.at(-1).stage}: ${plural(last.rows, "row")} of ${plural(most, "row")} at most, ${bytes(total)}.`),
    el("div", { class: "scroll" }, el("table", { class: "matrix" }, el("caption", { class: "hidden" }, "Rows that have a column, after each stage; bytes at most"), el("thead", {}, head), el("tbody", {}, rows))),
    tasks(last), leases(last), left(last));
}

function ready(count, rows, stage, colour) {
  const share = rows ? count / rows : 0;
  return el("td", { class: "cell", title: `after ${stage}: ${count} of ${rows} rows` },
    el("span", { class: "ready", style: { "--part": share, "--colour": colour ?? "#888" } }),
    el("span", { class: "hidden" }, percent(share, 0)));
}

function tasks(part) {
  // Rows that are read by their ids, and not claimed, are no task's.
  const entries = Object.entries(part.tasks ?? {}).filter(([, task]) => task.claimed);
  if (!entries.length) return null;
  const kinds = ["ready", "claimed", "leased", "finished"];
  return el("table", { class: "plain" }, el("thead", {}, el("tr", {}, ["task", ...kinds].map((kind) => el("th", { scope: "col" }, kind)))),
    el("tbody", {}, entries.map(([name, task]) => el("tr", {}, el("th", { scope: "row" }, name),
      kinds.map((kind) => el("td", {}, number(task[kind] ?? 0)))))));
}

function leases(part) {
  if (!part.leases?.length) return null;
  return el("table", { class: "plain" }, el("thead", {}, el("tr", {}, ["lease of", "task", "rows", "ends in"].map((kind) => el("th", { scope: "col" }, kind)))),
    el("tbody", {}, part.leases.map((one) => el("tr", { title: `lease ${one.claim}` }, el("th", { scope: "row" }, one.holder ?? "–"), el("td", {}, one.task),
      el("td", {}, number(one.rows)), el("td", {}, one.left_s === null ? "never" : seconds(Math.max(0, one.left_s)))))));
}

function left(part) {
  if (!part.left?.length || !Object.values(part.tasks ?? {}).some((task) => task.claimed)) return null;
  const makers = Object.entries(part.producers ?? {}).map(([name, rows]) => `${plural(rows, "row")} by ${name}`);
  const ids = part.left.slice(0, LEFT_SHOWN).map((one) => one.id), more = part.left_count - ids.length;
  return el("p", { class: "note" }, `In the store: ${makers.join(", ") || plural(part.rows, "row")}. `,
    `Not finished by every task: ${ids.join(", ")}${more > 0 ? `, and ${number(more)} more` : ""}.`);
}

// Bars of stacked samples against the budget, one lane per rank.
export function packing(record, colours) {
  const { budget, ranks, form } = record;
  const bins = ranks.flatMap((rank) => rank.bins.slice(0, Math.ceil(MOST_BINS / ranks.length)));
  const all = ranks.flatMap((rank) => rank.bins);
  // `tokens` is what a bin computes, padding included; its samples are the rest.
  const used = all.reduce((sum, bin) => sum + bin.rows.reduce((a, b) => a + b, 0), 0);
  const computed = all.reduce((sum, bin) => sum + bin.tokens, 0);
  const top = budget ?? Math.max(...bins.map((bin) => bin.tokens), 1);
  const costs = ranks.map((rank) => rank.cost), mean = costs.reduce((a, b) => a + b, 0) / (costs.length || 1);
  const room = all.length * top, colour = colours.train ?? "#888";
  const parts = [`${plural(all.length, "microbatch").replace(/chs$/, "ches")} on ${plural(ranks.length, "rank")}`,
    `${percent((computed - used) / (computed || 1))} of what is computed is padding`];
  if (budget) parts.push(`${percent(1 - computed / (room || 1))} of the budget of ${number(budget)} tokens is not used`);
  if (ranks.length > 1) parts.push(`the costliest rank has ${number(Math.max(...costs) / mean)} of the mean`);
  const words = parts.join(", ");
  let drawn = [];
  const lane = ranks.length > 4 ? 56 : 84, gap = 10;
  const made = picture(ranks.length * (lane + gap) + 4, words, (context, width) => {
    const x0 = 62, x1 = width - 4, most = Math.max(...ranks.map((rank) => Math.min(rank.bins.length, MOST_BINS)), 1);
    const wide = Math.min(90, (x1 - x0) / most);
    drawn = [];
    context.textBaseline = "middle";
    ranks.forEach((rank, at) => {
      const y0 = at * (lane + gap) + lane, y = (tokens) => y0 - (tokens / top) * lane;
      context.fillStyle = css("--muted");
      context.textAlign = "right";
      context.fillText(`rank ${rank.rank}`, x0 - 8, y0 - lane / 2);
      rank.bins.slice(0, MOST_BINS).forEach((bin, place) => {
        const left = x0 + place * wide, inner = Math.max(1, wide - (wide > 5 ? 2 : 0));
        context.fillStyle = css("--sunken");
        context.fillRect(left, y(top), inner, lane);
        context.fillStyle = css("--waste");
        context.fillRect(left, y(bin.tokens), inner, y0 - y(bin.tokens));
        let sum = 0;
        bin.rows.forEach((tokens, row) => {
          const under = y(sum), over = y(sum + tokens);
          context.fillStyle = colour;
          context.globalAlpha = row % 2 ? 0.62 : 0.9;
          context.fillRect(left, over, inner, Math.max(0.5, under - over - (under - over > 4 ? 0.75 : 0)));
          sum += tokens;
        });
        context.globalAlpha = 1;
        drawn.push({ x0: left, x1: left + wide, y0: y0 - lane, y1: y0, bin, rank: rank.rank, place });
      });
    });
  });
  tooltip(made, (x, y) => {
    const hit = drawn.find((one) => x >= one.x0 && x < one.x1 && y >= one.y0 && y <= one.y1);
    if (!hit) return null;
    const { bin } = hit, own = bin.rows.reduce((a, b) => a + b, 0);
    return `rank ${hit.rank}, microbatch ${hit.place}\n${plural(bin.rows.length, "sample")}, ${number(own)} tokens\n${number(bin.tokens - own)} of padding, ${number(top - bin.tokens)} not used`;
  });
  const cut = all.length > bins.length || record.cut ? el("p", { class: "note" }, "The first microbatches of each rank are shown.") : null;
  return el("figure", { class: "card" },
    el("figcaption", {}, el("h3", {}, `Step ${record.step}, ${record.stage}: ${form} microbatches`), el("p", { class: "note" }, `${words}.`)),
    made.node, cut, ranks.length > 1 ? costBars(ranks, mean, colour) : null);
}

function costBars(ranks, mean, colour) {
  const most = Math.max(...ranks.map((rank) => rank.cost), 1);
  return el("table", { class: "plain" }, el("caption", {}, "Cost with attention, in tokens"), el("tbody", {}, ranks.map((rank) =>
    el("tr", {}, el("th", { scope: "row" }, `rank ${rank.rank}`),
      el("td", { class: "bar" }, el("span", { class: "fill", style: { "--part": rank.cost / most, "--colour": colour } }), el("span", {}, number(rank.cost))),
      el("td", {}, mean ? `${rank.cost >= mean ? "+" : ""}${percent(rank.cost / mean - 1)}` : "")))));
}

// Layers by steps; a layer that strays shows as a darker row.
export function routes(table) {
  const prefix = "router_replay/exact_layer_";
  const layers = Object.keys(table.values).filter((name) => name.startsWith(prefix))
    .map((name) => Number(name.slice(prefix.length))).sort((a, b) => a - b);
  if (!layers.length) return null;
  const values = layers.map((layer) => table.values[prefix + layer]), { steps } = table;
  const all = values.flat().filter((value) => value !== null && value !== undefined);
  const low = all.reduce((a, b) => Math.min(a, b), 1);
  const lane = Math.max(4, Math.min(22, 320 / layers.length)), height = layers.length * lane + 20;
  let columns = [];
  const made = picture(height, `Agreement of routes by layer, from ${percent(low)} to 100 %`, (context, width) => {
    const x0 = 62, x1 = width - 4, count = Math.max(1, Math.min(steps.length, Math.floor((x1 - x0) / 2)));
    columns = Array.from({ length: count }, (_, at) => {
      const from = Math.floor((at * steps.length) / count), to = Math.max(from + 1, Math.floor(((at + 1) * steps.length) / count));
      return { from, to, x0: x0 + (at / count) * (x1 - x0), x1: x0 + ((at + 1) / count) * (x1 - x0) };
    });
    context.textBaseline = "middle";
    layers.forEach((layer, row) => {
      const every = Math.ceil(12 / lane);
      if (row % every === 0) {
        context.fillStyle = css("--muted");
        context.textAlign = "right";
        context.fillText(`layer ${layer}`, x0 - 8, row * lane + lane / 2);
      }
      for (const column of columns) {
        const value = meanOf(values[row], column);
        if (value === null) continue;
        context.fillStyle = shade(value, low);
        context.fillRect(column.x0, row * lane, column.x1 - column.x0 + 0.5, lane - (lane > 6 ? 1 : 0));
      }
    });
    context.fillStyle = css("--muted");
    context.textAlign = "left";
    context.fillText(`step ${steps[0]}`, x0, height - 8);
    context.textAlign = "right";
    context.fillText(`step ${steps.at(-1)}`, x1, height - 8);
  });
  tooltip(made, (x, y) => {
    const column = columns.find((one) => x >= one.x0 && x < one.x1), row = Math.floor(y / lane);
    if (!column || !(row in layers)) return null;
    const value = meanOf(values[row], column);
    return value === null ? null : `layer ${layers[row]}, step ${steps[column.from]}${column.to - column.from > 1 ? ` to ${steps[column.to - 1]}` : ""}\n${percent(value, 2)} of choices agree`;
  });
  const scale = el("span", { class: "scale", style: { background: `linear-gradient(90deg, ${shade(low, low)}, ${shade((1 + low) / 2, low)}, ${shade(1, low)})` } });
  return el("figure", { class: "card" }, el("figcaption", {}, el("h3", {}, "Recorded choices that are the trainer's own, by layer"),
    el("div", { class: "legend" }, percent(low), scale, "100 %")), made.node);
}

function meanOf(values, { from, to }) {
  let sum = 0, count = 0;
  for (let at = from; at < to; at += 1) if (values[at] !== null && values[at] !== undefined) { sum += values[at]; count += 1; }
  return count ? sum / count : null;
}

// From orange (the lowest) to blue (all agree), readable with any colour vision.
function shade(value, low) {
  const part = low < 1 ? (value - low) / (1 - low) : 1;
  const from = [202, 98, 40], middle = [226, 205, 160], to = [58, 120, 158];
  const [a, b, t] = part < 0.5 ? [from, middle, part * 2] : [middle, to, part * 2 - 1];
  return `rgb(${a.map((channel, at) => Math.round(channel + (b[at] - channel) * t)).join(",")})`;
}
