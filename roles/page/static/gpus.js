// GPUs, each a bar: slices as wide as their shares, filled as far as they are busy, with the colours of their models.

import { byId, colourClass, keep, make, setAttribute, setText, swatch } from "./dom.js";
import { number, percent } from "./figures.js";

export function showGpus(state) {
  const numbers = new Map(state.models.map((model) => [model.id, model.number]));
  keep(byId("gpu-list"), state.gpus, (gpu) => gpu.id, newGpu, (child, gpu) => fill(child, gpu, numbers));
  setText(byId("slices-more"), state.slices_more > 0 ? `${state.slices_more} more slices are not shown.` : "");
}

function newGpu(gpu) {
  const name = make("b", { text: gpu.id });
  const busy = make("span");
  const bar = make("div", { class: "gpu-bar", "aria-hidden": "true" });
  const list = make("ul", { class: "gpu-slices" });
  const sensors = make("p", { class: "sensors" });
  return { nodes: [make("div", { class: "gpu" }, make("div", { class: "gpu-head" }, name, busy), bar, list, sensors)], busy, bar, list, sensors };
}

const busyOf = (slice) => Object.values(slice.busy).reduce((sum, part) => sum + part, 0);

function fill(child, gpu, numbers) {
  const without = gpu.slices.filter((slice) => slice.share_percent === null).length;
  const shares = gpu.slices.map((slice) => slice.share_percent ?? 100 / without);
  const total = Math.max(100, shares.reduce((sum, share) => sum + share, 0));
  const busy = gpu.slices.reduce((sum, slice, at) => sum + Math.min(1, busyOf(slice)) * shares[at] / total, 0);
  const kind = [gpu.type, gpu.device === "cuda" ? gpu.sharing : gpu.device].filter(Boolean).join(", ");
  setText(child.busy, `${kind ? `${kind}: ` : ""}${gpu.slices.length ? `${percent(busy)} busy` : gpu.is_drained ? "drained" : "unused"}`);
  const slices = gpu.slices.map((slice, at) => ({ ...slice, share: shares[at], total }));
  keep(child.bar, slices, (slice) => slice.id, () => ({ nodes: [make("div", { class: "slice" })] }), ({ nodes: [node] }, slice) => {
    node.style.setProperty("flex", `0 1 ${(100 * slice.share / slice.total).toFixed(2)}%`);
    setAttribute(node, "data-state", slice.state);
    const shown = Object.entries(slice.busy).filter(([, part]) => part > 0);
    keep(node, shown, ([model]) => model, ([model]) => ({ nodes: [make("i", { class: colourClass(numbers.get(model)) })] }), (own, [, part]) => own.nodes[0].style.setProperty("height", `${Math.min(100, 100 * part).toFixed(1)}%`));
  });
  keep(child.list, gpu.slices, (slice) => slice.id, newSlice, (own, slice) => fillSlice(own, slice, numbers));
  const seen = gpu.sensors;
  const read = !seen ? [] : [
    seen.busy_percent !== null && `sensor ${number(seen.busy_percent)} %`,
    seen.memory_used_bytes !== null && `${number(seen.memory_used_bytes / 1e9)} of ${number(seen.memory_bytes / 1e9)} GB`,
    seen.power_w !== null && `${number(seen.power_w)} W`, seen.sm_mhz !== null && `${seen.sm_mhz} MHz`, seen.temperature_c !== null && `${number(seen.temperature_c)} °C`,
  ].filter(Boolean);
  setText(child.sensors, [...read, ...gpu.throttle.map((reason) => `held down by ${reason}`)].join(", "));
}

function newSlice(slice) {
  const name = make("span");
  const models = make("span");
  const state = make("span", { class: "state" });
  return { nodes: [make("li", { title: slice.id }, name, models, state)], name, models };
}

function fillSlice(child, slice, numbers) {
  const own = slice.id.split("/").at(-1);
  const share = slice.share_percent === null ? "" : `, ${number(slice.share_percent)} %`;
  setText(child.name, `slice ${own}${share}: `);
  setText(child.nodes[0].querySelector(".state"), slice.state === "ready" ? "" : ` ${slice.state}${slice.reason ? `: ${slice.reason}` : ""}`);
  const busiest = slice.models.map((model) => model).sort((a, b) => (slice.busy[b] ?? 0) - (slice.busy[a] ?? 0) || a.localeCompare(b));
  keep(child.models, busiest.map((model, at) => ({ model, at })), ({ model }) => `${model} ${numbers.get(model)}`, ({ model }) => {
    const words = make("span");
    return { nodes: [make("span", {}, swatch(numbers.get(model)), words), document.createTextNode(" ")], words };
  }, (one, { model, at }) => setText(one.words, `${model} ${percent(slice.busy[model] ?? 0)}${at + 1 < busiest.length ? "," : ""}`));
}
