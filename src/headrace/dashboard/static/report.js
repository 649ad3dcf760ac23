// A report: the page over runs that lie in the file itself.
import { el } from "./dom.js";
import { Page } from "./page.js";
import { findAmong } from "./samples.js";

export function start() {
  const given = JSON.parse(document.getElementById("given").textContent);
  const page = new Page(given.about, { find: (run, query) => findAmong(given.samples[run])(query), note: given.note });
  given.runs.forEach((run, at) => page.runs.set(at, run));
  page.shown = given.runs.map((_, at) => at);
  const names = given.runs.map((run, at) => el("span", { class: "entry" },
    given.runs.length > 1 ? el("span", { class: "swatch", style: { "--colour": page.colour(at) } }) : null, run.name));
  page.mount(el("header", {}, el("h1", {}, "headrace report"), el("p", { class: "chips legend" }, names)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page.refresh());
}
