// Samples: search, filters, and one opened, its tokens coloured.
import { el } from "./dom.js";
import { number, plural } from "./format.js";

const PAGE = 25;

export class Samples {
  // `find(query)` returns a promise of {total, matching, rows, seconds}.
  constructor(find, splits) {
    this.find = find;
    this.query = { text: "", verdict: "any", sort: "newest" };
    this.shown = PAGE;
    this.open = new Set();
    this.list = el("div", { class: "samples" });
    this.count = el("p", { class: "note", role: "status" });
    this.more = el("button", { type: "button", on: { click: () => { this.shown += PAGE; this.load(); } } }, "More");
    this.node = el("div", {}, this.form(splits), this.count, this.list, this.more);
    this.asked = 0;
    this.load();
  }

  form(splits) {
    const field = (name, input) => el("label", {}, el("span", {}, name), input);
    const select = (key, choices) => el("select", { on: { change: (event) => this.set(key, event.target.value) } },
      choices.map(([value, text]) => el("option", { value, selected: this.query[key] === value }, text)));
    const limit = (key, label) => el("input", { type: "number", step: "any", "aria-label": label, placeholder: label,
      on: { change: (event) => this.set(key, event.target.value) } });
    let waiting = 0;
    const search = el("input", { type: "search", placeholder: "in prompts, answers, ids", on: { input: (event) => {
      clearTimeout(waiting);
      waiting = setTimeout(() => this.set("text", event.target.value), 150);
    } } });
    return el("form", { class: "filters", role: "search", on: { submit: (event) => event.preventDefault() } },
      field("Search", search),
      field("Verdict", select("verdict", [["any", "any"], ["right", "right"], ["wrong", "wrong"], ["cut", "cut short"]])),
      splits.length > 1 ? field("Split", select("split", [["", "all"], ...splits.map((name) => [name, name])])) : null,
      field("Reward", el("span", { class: "pair" }, limit("min_reward", "least"), limit("max_reward", "most"))),
      field("Steps", el("span", { class: "pair" }, limit("first_step", "first"), limit("last_step", "last"))),
      field("Order", select("sort", [["newest", "newest"], ["oldest", "oldest"], ["highest", "highest reward"], ["lowest", "lowest reward"]])));
  }

  // There are more samples than before; what one is reading stays where it is.
  grown() {
    if (this.open.size || this.shown > PAGE) {
      this.count.replaceChildren("There are newer samples. ", el("button", { type: "button", on: { click: () => this.load() } }, "Show them"));
    } else this.load();
  }

  set(key, value) {
    this.query[key] = value;
    this.shown = PAGE;
    this.load();
  }

  async load() {
    const asked = ++this.asked;
    const given = Object.entries(this.query).filter(([, value]) => value !== "");
    let found;
    try {
      found = await this.find({ ...Object.fromEntries(given), offset: 0, limit: this.shown });
    } catch (error) {
      this.count.textContent = `The samples cannot be read: ${error.message}`;
      return;
    }
    if (asked !== this.asked) return;
    const all = plural(found.total, "sample");
    this.count.textContent = found.matching === found.total ? `${all}.` : `${number(found.matching)} of ${all} match.`;
    this.more.hidden = found.matching <= found.rows.length;
    this.list.replaceChildren(...found.rows.map((row) => this.item(row)));
  }

  item(sample) {
    const { prompt, completion } = texts(sample), key = `${sample.step}/${sample.sample_id ?? sample.row}`;
    const body = el("div", { class: "opened" });
    const fill = () => { if (!body.childNodes.length) body.append(...opened(sample)); };
    const node = el("details", { open: this.open.has(key), on: { toggle: () => {
      if (node.open) { this.open.add(key); fill(); } else this.open.delete(key);
    } } },
    el("summary", {}, el("span", { class: "when" }, `step ${sample.step}`), mark(sample),
      el("span", { class: "reward" }, sample.reward === undefined || sample.reward === null ? "" : number(sample.reward)),
      el("span", { class: "text" }, oneLine(prompt)), el("span", { class: "text answer" }, oneLine(completion))), body);
    if (node.open) fill();
    return node;
  }
}

function mark(sample) {
  const right = el("span", { class: "mark right", role: "img", "aria-label": "right", title: "right" }, "✓");
  const wrong = el("span", { class: "mark wrong", role: "img", "aria-label": "wrong", title: "wrong" }, "✗");
  const verdict = sample.correct === true ? right : sample.correct === false ? wrong : el("span", { class: "mark" });
  const cut = sample.truncated ? el("span", { class: "mark", role: "img", "aria-label": "cut short", title: "cut short at a length limit" }, "✂") : null;
  return el("span", { class: "marks" }, verdict, cut);
}

function text(value) {
  return typeof value === "string" ? value : value === undefined || value === null ? "" : JSON.stringify(value);
}

// Prompt: what stands before the first answer; completion: that answer and all that follows it.
export function texts(sample) {
  const messages = sample.messages ?? [];
  if (!messages.length) return { prompt: text(sample.prompt), completion: text(sample.answer ?? sample.completion) };
  const found = messages.findIndex((message) => message.role === "assistant");
  const first = found < 0 ? messages.length : found;
  const join = (part) => part.map((message) => text(message.content)).join("\n");
  return { prompt: join(messages.slice(0, first)), completion: join(messages.slice(first)) };
}

function oneLine(value) {
  const line = value.replace(/\s+/g, " ").trim();
  return line.length > 160 ? `${line.slice(0, 160)}…` : line;
}

function opened(sample) {
  const parts = (sample.messages ?? []).map((message) => part(message.role ?? "message", el("pre", {}, text(message.content))));
  if (!parts.length) {
    const { prompt, completion } = texts(sample);
    parts.push(part("prompt", el("pre", {}, prompt)), part("completion", el("pre", {}, completion)));
  }
  if (sample.expected !== undefined && sample.expected !== null) parts.push(part("expected", el("pre", {}, text(sample.expected))));
  const facts = { reward: sample.reward, advantage: sample.advantage, ...(sample.parts ?? {}) };
  const rows = Object.entries(facts).filter(([, value]) => value !== undefined && value !== null);
  if (rows.length) {
    parts.push(part("reward parts", el("table", { class: "plain" }, el("tbody", {}, rows.map(([name, value]) =>
      el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, typeof value === "number" ? number(value) : text(value))))))));
  }
  if (sample.tokens?.text?.length) parts.push(tokens(sample.tokens));
  if (sample.sample_id) parts.push(el("p", { class: "note" }, `id ${sample.sample_id}`));
  return parts;
}

function part(name, body) {
  return el("section", {}, el("h4", {}, name), body);
}

// Tokens with a background by what the trainer thinks of them, or by their advantage.
function tokens(given) {
  const kinds = [["gap", "logprob gap"], ["advantage", "advantage"]].filter(([key]) => given[key]?.some((value) => value !== null));
  const body = el("p", { class: "tokens" }), note = el("span", { class: "note" });
  const paint = (key) => {
    const values = given[key], own = values.map((value, at) => (given.mask[at] ? value : null));
    const most = own.reduce((top, value) => Math.max(top, Math.abs(value ?? 0)), 0);
    const worst = own.findIndex((value) => value !== null && Math.abs(value) === most);
    body.replaceChildren(...given.text.map((token, at) => {
      const value = own[at], share = value === null || !most ? 0 : Math.abs(value) / most;
      const colour = value === null ? "none" : value < 0 ? "below" : "above";
      return el("span", { class: `token ${colour}`, style: { "--share": share.toFixed(3) }, title: about(given, at) }, shown(token));
    }));
    const words = key === "gap" ? "trainer's logprob minus generator's: red, the trainer gives it less" : "red: below the baseline, blue: above";
    note.textContent = most ? `${words}; largest ${number(values[worst])} at “${given.text[worst]}”` : `${words}; all are 0`;
  };
  const choices = kinds.map(([key, name], at) => el("label", {}, el("input", { type: "radio", name: `tokens-${tokens.count}`, checked: at === 0, on: { change: () => paint(key) } }), name));
  tokens.count += 1;
  if (kinds.length) paint(kinds[0][0]);
  const cut = given.cut ? el("p", { class: "note" }, `The first ${given.text.length} tokens (logging.tokens_per_sample).`) : null;
  return part("tokens", el("div", {}, el("fieldset", { class: "choices" }, el("legend", { class: "hidden" }, "Colour by"), choices, note), body, cut));
}
tokens.count = 0;

function about(given, at) {
  const facts = [["logprob", given.logprob?.[at]], ["gap", given.gap?.[at]], ["advantage", given.advantage?.[at]]];
  return [given.text[at], ...facts.filter(([, value]) => value !== undefined && value !== null).map(([name, value]) => `${name} ${number(value)}`)].join("\n");
}

function shown(token) {
  return token.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥");
}

// For a report: the same search over samples that are all here.
export function findAmong(samples) {
  return async (query) => {
    const wanted = (query.text ?? "").toLowerCase();
    const inside = (value, low, high) => (low === undefined || value >= Number(low)) && (high === undefined || value <= Number(high));
    const verdicts = { any: () => true, right: (one) => one.correct === true, wrong: (one) => one.correct === false, cut: (one) => one.truncated };
    const rows = samples.filter((one) => {
      const { prompt, completion } = texts(one);
      const all = `${prompt}\n${completion}\n${text(one.expected)}\n${text(one.sample_id)}`;
      return all.toLowerCase().includes(wanted) && verdicts[query.verdict ?? "any"](one)
        && inside(one.reward, query.min_reward, query.max_reward) && inside(one.step, query.first_step, query.last_step)
        && (!query.split || one.split === query.split);
    });
    const by = { newest: null, oldest: (a, b) => a.row - b.row, highest: (a, b) => b.reward - a.reward, lowest: (a, b) => a.reward - b.reward };
    if (by[query.sort]) rows.sort(by[query.sort]);
    return { total: samples.length, matching: rows.length, rows: rows.slice(0, query.limit) };
  };
}
