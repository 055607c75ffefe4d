// Puts the page together: what comes from the feed goes to each panel.

import { Batches } from "./batches.js";
import { byId, setText } from "./dom.js";
import { Feed } from "./feed.js";
import { ms } from "./figures.js";
import { showGpus } from "./gpus.js";
import { showModels } from "./models.js";
import { showAlarms, showLate, showPlan } from "./plan.js";
import { askWhy, listenForWhatIf, offerModels } from "./questions.js";
import { Timeline } from "./timeline.js";

const THEMES = ["auto", "light", "dark"];
const SAID = { auto: "Theme: as the system", light: "Theme: light", dark: "Theme: dark" };
const ANNOUNCE_EVERY_MS = 10_000;

const batches = new Batches();
const timeline = new Timeline(batches);
let announcedAt = -ANNOUNCE_EVERY_MS;

function onNews(news) {
  const { state, frames, age_ms: age, trouble } = news;
  if (news.isServedAnew) batches.clear();
  if (frames.length) batches.add(frames);
  if (!state) {
    connection(trouble ? "lost" : "waiting", trouble || "asking the cluster");
    return;
  }
  verdict(state.missed, state.models.length + state.models_more);
  facts(state);
  showAlarms(state.alarms);
  showModels(state, askWhy, frames.length > 0);
  showGpus(state);
  showPlan(state);
  showLate(state.late);
  offerModels(state.models);
  setText(byId("batches-more"), batches.leftOut ? `${batches.leftOut} more batches of the last minute are not shown.` : "");
  timeline.news(state, news.at_ms, frames.length ? frames.at(-1).until_ms : null);
  if (trouble) connection("lost", `${trouble}; as it was ${ms(age)} ago`);
  else connection("live", age > 3000 ? `as it was ${ms(age)} ago` : "live");
}

function verdict({ count: missed, named }, count) {
  const more = missed > named.length ? ` and ${missed - named.length} more` : "";
  const text = missed ? `${named.join(", ")}${more} ${missed === 1 ? "misses its SLO" : "miss their SLOs"}` : count === 1 ? "The model keeps its SLO" : `All ${count} models keep their SLOs`;
  const node = byId("verdict");
  node.dataset.state = missed ? "bad" : "good";
  if (node.textContent === text) return;
  setText(node, text);
  document.title = missed ? `✗ ${missed} – Tenuto` : "✓ Tenuto";
  if (performance.now() - announcedAt >= ANNOUNCE_EVERY_MS) {
    announcedAt = performance.now();
    setText(byId("announcer"), text);
  }
}

function facts({ cluster, gpus, models, models_more: more }) {
  const count = models.length + more;
  const standbys = cluster.standbys.length ? `, ${cluster.standbys.join(", ")} standing by` : "";
  const shards = cluster.shards > 1 ? `${cluster.shards} shards, ` : "";
  setText(byId("facts"), `${shards}${cluster.scheduler} active${standbys}, ${cluster.frontends} frontend${cluster.frontends === 1 ? "" : "s"}, ${gpus.length} GPU${gpus.length === 1 ? "" : "s"}, ${count} model${count === 1 ? "" : "s"}`);
}

function connection(state, text) {
  byId("connection").dataset.state = state;
  setText(byId("connection-text"), text);
}

function theme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  setText(byId("theme"), SAID[name]);
  timeline.recolour();
}

function remembered() {
  try {
    const name = localStorage.getItem("tenuto-theme");
    return THEMES.includes(name) ? name : "auto";
  } catch {
    return "auto"; // a browser may keep nothing
  }
}

byId("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % THEMES.length];
  try {
    localStorage.setItem("tenuto-theme", next);
  } catch {
    // it lasts as long as the page then
  }
  theme(next);
});

theme(remembered());
listenForWhatIf();
new Feed(onNews, (reason) => connection("lost", reason)).wake();
