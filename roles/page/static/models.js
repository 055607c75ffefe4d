// The table of models: how each fares, against its SLO, and where the time of its requests goes.

import { byId, colourClass, keep, make, setAttribute, setText, swatch } from "./dom.js";
import { ms, number, percent } from "./figures.js";

// The order of the feed's `stages_ms`, and which part of the bar each belongs to.
const STAGES = ["way", "held", "waited", "way", "way", "gpu", "way"];
const PARTS = [
  ["held", "held on purpose, for larger batches"],
  ["waited", "waiting for a free slice"],
  ["gpu", "running"],
  ["way", "decoding, and on its way"],
];
const METER_TO = 1.25; // of the SLO
const MINUTE = 60;

const history = new Map(); // model -> {rates, bads}

export function showModels(state, onWhy, isNews) {
  for (const name of history.keys()) if (!state.models.some((model) => model.id === name)) history.delete(name);
  keep(byId("model-rows"), state.models, (model) => model.id, (model) => newRow(model, onWhy), (child, model) => fill(child, model, isNews));
  setText(byId("models-more"), state.models_more > 0 ? `${state.models_more} more models are not shown.` : "");
  keep(byId("legend"), state.models.slice(0, 40), (model) => `${model.id} ${model.number}`, (model) => ({ nodes: [make("li", {}, swatch(model.number), make("span", { text: model.id }))] }), () => {});
  keep(byId("stage-legend"), PARTS, (part) => part[0], ([name, text]) => ({ nodes: [make("li", {}, make("span", { class: `swatch st-${name}`, "aria-hidden": "true" }), make("span", { text }))] }), () => {});
}

function newRow(model, onWhy) {
  const mark = make("span", { class: "mark", "aria-hidden": "true" });
  const name = make("span", { text: model.id });
  const state = make("span", { class: "unseen" });
  const cell = (label, kind = "n") => make("td", { class: kind, "data-label": label });
  const cells = {
    rate: cell("requests/s"), good: cell("good/s"), bad: cell("late, dropped", "n bad-figure"),
    p50: cell("p50 ms"), p99: cell("p99 ms"), slo: cell("SLO ms"), meter: cell("p50 and p99 in the SLO", "full"),
    queue: cell("waiting"), batch: cell("batch"), stages: cell("where the time goes", "full"), spark: cell("last minute", "full wide-only"), ask: make("td", { class: "n" }),
  };
  const meter = newMeter();
  cells.meter.append(meter.svg);
  const parts = PARTS.map(([part]) => make("span", { class: `st-${part}` }));
  const bar = make("div", { class: "stages", role: "img" }, ...parts);
  cells.stages.append(bar);
  const spark = newSpark();
  cells.spark.append(spark.svg);
  const why = make("button", { type: "button", text: "Why?", "aria-label": `Why does ${model.id} fare so?` });
  why.addEventListener("click", () => onWhy(model.id));
  cells.ask.append(why);
  const head = make("th", { scope: "row" }, mark, swatch(model.number), name, state);
  const figures = make("tr", { class: "figures" }, head, ...Object.values(cells));
  const sentence = make("td", { colspan: "13" });
  return { nodes: [figures, make("tr", { class: "says" }, sentence)], figures, mark, state, cells, meter, parts, bar, spark, sentence, swatch: head.querySelector(".swatch") };
}

function fill(child, model, isNews) {
  child.figures.classList.toggle("is-missed", model.is_missed);
  setText(child.mark, model.is_missed ? "✗" : "✓");
  setText(child.state, model.is_missed ? ", misses its SLO" : "");
  setAttribute(child.swatch, "class", `swatch ${colourClass(model.number)}`);
  const { cells } = child;
  setText(cells.rate, number(model.rate_rps));
  setText(cells.good, number(model.goodput_rps));
  setText(cells.bad, percent(model.bad_rate));
  setAttribute(cells.bad, "data-bad", model.is_missed);
  setText(cells.p50, number(model.p50_ms));
  setText(cells.p99, number(model.p99_ms));
  setText(cells.slo, number(model.slo_ms));
  setText(cells.queue, number(model.queued));
  setText(cells.batch, number(model.batch_mean));
  setText(child.sentence, model.says);
  fillMeter(child.meter, model);
  fillStages(child, model);
  if (isNews) fillSpark(child.spark, model);
}

// ------------------------------------------------------------------ p50 and p99 on a line that ends a quarter behind the SLO

function newMeter() {
  const rect = (kind) => make("rect", { class: kind, y: "5", height: "8", x: "0", width: "0" });
  const [track, reach, over, slo, p50, p99] = ["track", "reach", "over", "slo", "tick", "tick"].map(rect);
  const at = (100 / METER_TO).toFixed(2);
  setAttribute(track, "width", "100");
  for (const [name, value] of [["x", at], ["width", "0.8"], ["y", "0"], ["height", "18"]]) setAttribute(slo, name, value);
  for (const [tick, y, height] of [[p50, "7", "4"], [p99, "2", "14"]]) {
    setAttribute(tick, "y", y);
    setAttribute(tick, "height", height);
    setAttribute(tick, "width", "1.2");
  }
  const svg = make("svg", { class: "meter", viewBox: "0 0 100 18", preserveAspectRatio: "none", role: "img" }, track, reach, over, slo, p50, p99);
  return { svg, reach, over, p50, p99 };
}

function fillMeter(meter, model) {
  const end = 100 / METER_TO;
  const at = (value) => Math.min(99, (end * (value ?? 0)) / model.slo_ms);
  const reach = at(model.p99_ms);
  setAttribute(meter.reach, "width", Math.min(reach, end).toFixed(2));
  setAttribute(meter.over, "x", end.toFixed(2));
  setAttribute(meter.over, "width", Math.max(0, reach - end).toFixed(2));
  for (const [tick, value] of [[meter.p50, model.p50_ms], [meter.p99, model.p99_ms]]) {
    setAttribute(tick, "x", at(value).toFixed(2));
    setAttribute(tick, "visibility", value === null ? "hidden" : "visible");
  }
  setAttribute(meter.svg, "aria-label", model.p99_ms === null ? "nothing was answered" : `p50 at ${percent(model.p50_ms / model.slo_ms)}, p99 at ${percent(model.p99_ms / model.slo_ms)} of the SLO`);
}

// ------------------------------------------------------------------ where the time goes

function fillStages(child, model) {
  const sums = Object.fromEntries(PARTS.map(([part]) => [part, 0]));
  (model.stages_ms ?? []).forEach((value, at) => (sums[STAGES[at]] += value));
  PARTS.forEach(([part], at) => child.parts[at].style.setProperty("flex-grow", sums[part].toFixed(3)));
  const words = PARTS.filter(([part]) => sums[part] > 0).map(([part, text]) => `${ms(sums[part])} ${text}`);
  setAttribute(child.bar, "aria-label", words.join(", ") || "nothing was answered");
  setAttribute(child.bar, "title", words.join("\n"));
}

// ------------------------------------------------------------------ the last minute

function newSpark() {
  const line = make("polyline", { class: "rate" });
  const svg = make("svg", { class: "spark", viewBox: "0 0 60 26", preserveAspectRatio: "none", role: "img" }, line);
  const bads = Array.from({ length: MINUTE }, (_, at) => make("rect", { class: "bad", x: String(at), width: "0.9", y: "26", height: "0" }));
  svg.append(...bads);
  return { svg, line, bads };
}

function fillSpark(spark, model) {
  if (!history.has(model.id)) history.set(model.id, { rates: [], bads: [] });
  const { rates, bads } = history.get(model.id);
  rates.push(model.rate_rps ?? 0);
  bads.push(model.bad_rate ?? 0);
  while (rates.length > MINUTE) {
    rates.shift();
    bads.shift();
  }
  const most = Math.max(1e-9, ...rates);
  const shift = MINUTE - rates.length;
  setAttribute(spark.line, "points", rates.map((rate, at) => `${shift + at + 0.5},${(24 - (20 * rate) / most).toFixed(1)}`).join(" "));
  spark.bads.forEach((rect, at) => {
    const part = bads[at - shift] ?? 0;
    const high = part > 0 ? Math.max(1.5, 24 * Math.min(1, part)) : 0;
    setAttribute(rect, "height", high.toFixed(1));
    setAttribute(rect, "y", (26 - high).toFixed(1));
  });
  setAttribute(spark.svg, "aria-label", `${number(Math.min(...rates))} to ${number(Math.max(...rates))} requests a second in ${rates.length} s, at most ${percent(Math.max(...bads))} late or dropped`);
}
