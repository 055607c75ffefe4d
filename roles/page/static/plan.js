// The plan, what it is for, what was done lately, and what the load asks for. Alarms, and late requests.

import { byId, keep, make, setHidden, setText, swatch } from "./dom.js";
import { ago, ms, number } from "./figures.js";

export function showPlan(state) {
  const { plan, models, cluster } = state;
  if (!plan) {
    setText(byId("plan-state"), "The scheduler has no plan that changes.");
    return;
  }
  const moves = `${plan.moves_done} moves done${plan.moves_failed ? `, ${plan.moves_failed} failed` : ""}`;
  setText(byId("plan-state"), `The plan is ${plan.state}${plan.reason ? `: ${plan.reason}` : ""}. ${moves}. Epoch ${cluster.epoch ?? "–"}.`);
  setText(byId("plan-advice"), advice(plan));
  keep(byId("plan-rows"), models, (model) => model.id, newRow, (child, model) => {
    setText(child.cells[1], number(model.rate_rps));
    setText(child.cells[2], number(model.planned_rps));
    setText(child.cells[3], advised(model));
  });
  const told = [...plan.unplaced.map((one) => `${one.model} found no place: ${one.reason}`), ...plan.lately.slice().reverse()];
  const lines = told.length ? told : ["Nothing has changed since the scheduler began."];
  keep(byId("plan-lately"), lines.map((line, at) => ({ line, key: `${at} ${line}` })), (one) => one.key, ({ line }) => ({ nodes: [make("li", { text: line })] }), () => {});
}

function advice(plan) {
  if (plan.gpus_advised > plan.gpus) return `The load asks for ${plan.gpus_advised} GPUs; there are ${plan.gpus}.`;
  if (plan.gpus_advised < plan.gpus) return `The load asks for ${plan.gpus_advised} of the ${plan.gpus} GPUs.`;
  return `The load asks for the ${plan.gpus} GPU${plan.gpus === 1 ? "" : "s"} that there ${plan.gpus === 1 ? "is" : "are"}.`;
}

function advised(model) {
  const gpus = model.gpus_advised ?? 0;
  if (Math.abs(gpus) < 0.05) return "fits";
  return gpus > 0 ? `lacks ${number(gpus)} GPU` : `leaves ${number(-gpus)} GPU idle`;
}

function newRow(model) {
  const cells = [make("th", { scope: "row" }, swatch(model.number), make("span", { text: model.id })), make("td", { class: "n" }), make("td", { class: "n" }), make("td")];
  return { nodes: [make("tr", {}, ...cells)], cells };
}

export function showAlarms(alarms) {
  setHidden(byId("alarms"), alarms.length === 0);
  const seen = new Map();
  const keyed = alarms.map((alarm) => {
    const name = `${alarm.level} ${alarm.about}`;
    seen.set(name, (seen.get(name) ?? 0) + 1);
    return { ...alarm, key: `${name} ${seen.get(name)}` };
  });
  keep(byId("alarm-list"), keyed, (alarm) => alarm.key, (alarm) => {
    const words = make("span");
    return { nodes: [make("li", { "data-level": alarm.level }, make("b", { text: alarm.about }), words)], words };
  }, (child, alarm) => setText(child.words, alarm.text));
}

export function showLate(requests) {
  setHidden(byId("late-none"), requests.length > 0);
  keep(byId("late-list"), requests, (one) => one.request_id, (one) => {
    const when = make("span", { class: "ago" });
    const outcome = one.outcome === "late" ? `answered after ${ms(one.total_ms)} of ${ms(one.budget_ms)}` : `refused: ${one.outcome}`;
    const head = make("summary", {}, make("span", { text: `${one.model}, ${outcome}, ` }), when);
    const sentences = one.sentences.map((text) => make("p", { text }));
    return { nodes: [make("li", {}, make("details", {}, head, ...sentences))], when };
  }, (child, one) => setText(child.when, ago(one.ago_ms)));
}
