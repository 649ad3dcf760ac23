// The live page: runs by the server, their news by server-sent events.
import { el } from "./dom.js";
import { Page, append } from "./page.js";

const MOST_ROWS = 12000;
const THEMES = ["auto", "light", "dark"];
const MOST_AT_FIRST = 1;

async function get(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error((await answer.text()).trim() || answer.statusText);
  return answer.json();
}

class Live {
  constructor(about) {
    this.page = new Page(about, { find: (run, query) => get(`api/runs/${run}/samples?${new URLSearchParams(query)}`) });
    this.status = el("span", { class: "status", role: "status" }, "");
    this.events = null;
  }

  async start() {
    const { page } = this, { runs } = page.about;
    const named = new URLSearchParams(location.search).getAll("run").map((name) => runs.indexOf(name)).filter((run) => run >= 0);
    const first = named.length ? named : runs.map((_, run) => run).slice(0, MOST_AT_FIRST);
    await Promise.all(first.map((run) => this.load(run)));
    page.shown = first;
    page.mount(this.top());
    this.listen();
  }

  async load(run) {
    this.page.runs.set(run, await get(`api/runs/${run}`));
  }

  top() {
    const { page } = this;
    const boxes = page.about.runs.map((name, run) => el("label", { class: "chip" },
      el("input", { type: "checkbox", checked: page.shown.includes(run), on: { change: (event) => this.choose(run, event.target.checked) } }),
      el("span", { class: "swatch", "aria-hidden": "true" }), name));
    this.chips = boxes;
    this.paint();
    return el("header", {}, el("h1", {}, el("img", { src: "icon.svg", alt: "", width: 20, height: 20 }), "headrace"),
      el("fieldset", { class: "chips" }, el("legend", { class: "hidden" }, "Runs that are shown"), boxes), this.status, themeButton(page));
  }

  paint() {
    const { page } = this;
    this.chips.forEach((chip, run) => {
      const isShown = page.shown.includes(run);
      chip.querySelector(".swatch").style.setProperty("--colour", isShown && page.isCompared ? page.colour(run) : "var(--muted)");
    });
    const running = page.shown.filter((run) => page.data(run).state === "running").length;
    this.status.textContent = running ? "live" : "";
    this.status.classList.toggle("on", running > 0);
  }

  async choose(run, isWanted) {
    const { page } = this;
    if (isWanted) await this.load(run);
    page.shown = isWanted ? [...page.shown, run].sort((a, b) => a - b) : page.shown.filter((other) => other !== run);
    const query = new URLSearchParams(page.shown.map((shown) => ["run", page.about.runs[shown]]));
    history.replaceState(null, "", page.shown.length ? `?${query}` : location.pathname);
    this.paint();
    page.rebuild();
    this.listen();
  }

  listen() {
    const { page } = this;
    this.events?.close();
    if (!page.shown.length) return;
    const cursors = Object.fromEntries(page.shown.map((run) => [run, page.data(run).cursor]));
    this.events = new EventSource(`api/events?cursors=${encodeURIComponent(JSON.stringify(cursors))}`);
    this.events.onopen = () => this.paint();
    this.events.onmessage = (event) => this.hear(JSON.parse(event.data));
    this.events.onerror = () => {
      this.status.textContent = "the page's server does not answer";
      this.status.classList.remove("on");
      // The browser would come again with the cursors of this moment's start.
      this.events.close();
      clearTimeout(this.again);
      this.again = setTimeout(() => this.listen(), 3000);
    };
  }

  async hear(news) {
    const { page } = this, data = page.data(news.run);
    if (!data) return;
    if (news.reload || data.steps.steps.length > MOST_ROWS) {
      await this.load(news.run);
      page.rebuild();
      this.listen();
      return;
    }
    for (const table of ["steps", "validations", "phases"]) append(data[table], news[table]);
    for (const key of ["cursor", "state", "summary", "step", "samples", "detail", "damaged", "colours"]) data[key] = news[key];
    page.refresh();
    this.paint();
  }
}

function themeButton(page) {
  const stored = localStorage.getItem("theme");
  let at = Math.max(0, THEMES.indexOf(stored));
  const button = el("button", { type: "button", class: "theme", on: { click: () => { at = (at + 1) % THEMES.length; set(); } } });
  const set = () => {
    const theme = THEMES[at];
    if (theme === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = theme;
    localStorage.setItem("theme", theme);
    button.textContent = `theme: ${theme}`;
    if (page.sections.curves) page.refresh();
  };
  set();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page.refresh());
  return button;
}

try {
  await new Live(await get("api/about")).start();
} catch (error) {
  document.body.replaceChildren(el("p", { class: "failed", role: "alert" }, `The runs cannot be shown: ${error.message}`));
}
