// Questions that take a simulation: why a model misses its SLO, and what would be if.

import { byId, keep, make, setHidden, setText, swatch } from "./dom.js";
import { asked } from "./feed.js";
import { number, percent } from "./figures.js";

const PLAYING = "Playing the last minute again, at idle priority …";

let newest = 0; // of the questions why

export function askWhy(model) {
  const dialog = byId("why");
  const own = ++newest;
  const isWanted = () => dialog.open && own === newest;
  setText(byId("why-title"), `Why does ${model} fare so?`);
  setText(byId("why-state"), PLAYING);
  setText(byId("why-command"), "");
  byId("why-findings").replaceChildren();
  setHidden(byId("why-remedies"), true);
  if (!dialog.open) dialog.showModal();
  asked("why", { model }, (command) => isWanted() && setText(byId("why-command"), command)).then(
    (answer) => isWanted() && showWhy(answer),
    (error) => isWanted() && setText(byId("why-state"), `It could not be said: ${error.message}`),
  );
}

function showWhy(answer) {
  const count = `${answer.bad} of ${answer.offered} requests of the last ${number(answer.span_s)} s were late or refused (${percent(answer.bad_rate)})`;
  const isFine = !answer.findings.length && answer.bad_rate < 0.01;
  const none = answer.findings.length || isFine ? "" : " Nothing that is measured explains it.";
  const verdict = answer.offered ? `It ${isFine ? "keeps" : "misses"} its SLO of ${number(answer.slo_ms)} ms: ${count}.${none}` : `No request came in the last ${number(answer.span_s)} s.`;
  setText(byId("why-state"), withRemarks(verdict, answer));
  byId("why-findings").replaceChildren(...answer.findings.map((finding, at) => make("li", {}, make("b", { text: `${at + 1}. ${finding.cause.replaceAll("_", " ")}` }), make("p", { text: `${finding.sentence}.` }), make("p", { class: "note", text: `${finding.advice}.` }))));
  setHidden(byId("why-remedies"), answer.remedies.length === 0);
  byId("why-rows").replaceChildren(...answer.remedies.map((remedy) => make("tr", {}, make("th", { scope: "row", text: remedy.change }), make("td", { class: "n", text: percent(remedy.bad_rate) }), make("td", { text: remedy.is_enough ? "yes" : "it helps" }))));
}

function withRemarks(text, { remarks }) {
  return [text, ...remarks.map((remark) => `${remark[0].toUpperCase()}${remark.slice(1)}.`)].join(" ");
}

let numbers = new Map();

export function offerModels(models) {
  numbers = new Map(models.map((model) => [model.id, model.number]));
  const select = byId("wi-model");
  keep(select, models, (model) => model.id, (model) => ({ nodes: [make("option", { value: model.id, text: model.id })] }), () => {});
}

export function listenForWhatIf() {
  byId("what-if-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const form = event.target;
    const fields = Object.fromEntries([...new FormData(form)].filter(([, value]) => value !== ""));
    if (!fields.slo_ms && !fields.rate && !Number(fields.gpus ?? 0)) {
      setText(byId("wi-state"), "Say what is to be changed: the SLO, the requests or the GPUs.");
      byId("wi-slo").focus();
      return;
    }
    if (!fields.slo_ms && !fields.rate) delete fields.model;
    const button = form.querySelector("button");
    button.disabled = true;
    setHidden(byId("wi-answer"), true);
    setText(byId("wi-state"), PLAYING);
    try {
      showAnswer(await asked("what-if", fields, (command) => setText(byId("wi-command"), command)));
    } catch (error) {
      setText(byId("wi-state"), `It could not be played: ${error.message}`);
    } finally {
      button.disabled = false;
    }
  });
}

function showAnswer(answer) {
  setText(byId("wi-state"), withRemarks(`${answer.sentence} ${answer.doubt}`.trim(), answer));
  const rows = Object.entries(answer.models).flatMap(([model, { today, then }]) => [row(model, today, "today"), row(model, then, "then")]);
  byId("wi-rows").replaceChildren(...rows);
  setHidden(byId("wi-answer"), false);
}

function row(model, one, when) {
  const head = when === "today" ? make("th", { scope: "row" }, swatch(numbers.get(model)), make("span", { text: model })) : make("th", { scope: "row" }, make("span", { class: "unseen", text: model }));
  const cell = (text) => make("td", { class: "n", text });
  return make("tr", { class: when }, head, make("td", { text: when }), cell(number(one.rate_rps)), cell(number(one.goodput_rps)), cell(percent(one.bad_rate)), cell(number(one.p50_ms)), cell(number(one.p99_ms)));
}
