// The timeline: a row for each slice, as the lines of a staff, and a block for each batch.
//
// It plays a little behind what is known, so that it moves evenly. A window under two seconds would rush by: it shows the
// newest moment once a second instead, and so does every window where motion is to be reduced.

import { byId, keep, make, setText, swatch } from "./dom.js";
import { ms, number, percent } from "./figures.js";

const WINDOWS = [250, 500, 1000, 2000, 4000, 10000, 30000];
const MINUTE_MS = 60_000;
const GPU_GAP = 9;
const AXIS = 22;
const FRAME_MS = 33;

export class Timeline {
  constructor(batches) {
    this.batches = batches;
    this.canvas = byId("canvas");
    this.stage = byId("stage");
    this.tip = byId("tip");
    this.rows = []; // {slice, id, name, short, y, isFirst}
    this.tall = 34; // of a row
    this.models = new Map();
    this.windowMs = 4000;
    this.pausedAtMs = null;
    this.clock = null; // {serverMs, hereMs}
    this.lagMs = 1400;
    this.gaps = []; // how old the newest batches were before the next ones came, of the last answers
    this.knownMs = null;
    this.drawnAt = 0;
    this.colours = [];
    this.reduced = matchMedia("(prefers-reduced-motion: reduce)");
    this.#listen();
    new ResizeObserver(() => this.draw()).observe(this.stage);
    requestAnimationFrame((at) => this.#turn(at));
  }

  // ---------------------------------------------------------------- news

  news(state, serverMs, knownMs) {
    const here = performance.now();
    if (this.clock) {
      const drift = serverMs - (this.clock.serverMs + here - this.clock.hereMs);
      // Answers that were under way for long say less; a page that was served anew has another clock.
      this.clock = { serverMs: Math.abs(drift) > 5000 ? serverMs : serverMs - drift * 0.9, hereMs: here };
    } else this.clock = { serverMs, hereMs: here };
    if (knownMs !== null) {
      if (this.knownMs !== null) this.gaps = [...this.gaps, serverMs - this.knownMs].slice(-10);
      this.knownMs = knownMs;
    }
    // Late enough for nearly every answer, and changed so slowly that nobody sees it.
    const wantedMs = Math.min(6000, Math.max(1100, ...this.gaps) + 100);
    this.lagMs += Math.max(-60, Math.min(this.gaps.length < 3 ? 3000 : 150, wantedMs - this.lagMs));
    this.models = new Map(state.models.map((model) => [model.number, model]));
    this.#layOut(state.gpus);
    if (this.isStepped && this.pausedAtMs === null) this.draw();
    this.#tell();
  }

  #layOut(gpus) {
    const rows = [];
    const hosts = new Set(gpus.map((gpu) => gpu.id.split("/gpu")[0]));
    const count = gpus.reduce((sum, gpu) => sum + gpu.slices.length, 0);
    const tall = count <= 6 ? 34 : count <= 14 ? 28 : 22;
    let y = AXIS + 4;
    for (const gpu of gpus) {
      if (!gpu.slices.length) continue;
      const short = hosts.size === 1 ? gpu.id.replace(/^.*\//, "") : gpu.id;
      gpu.slices.forEach((slice, at) => {
        const own = slice.id.split("/").at(-1);
        const share = slice.share_percent === null ? "" : ` ${number(slice.share_percent)} %`;
        const name = gpu.slices.length === 1 ? short : `${short}·${own}`;
        rows.push({ slice: slice.number, id: slice.id, name: `${name}${share}`, short: name, y, isFirst: at === 0 });
        y += tall;
      });
      y += GPU_GAP;
    }
    const signature = rows.map((row) => row.id + row.name).join(" ");
    const height = Math.max(AXIS + 60, y);
    this.rows = rows;
    this.tall = tall;
    if (signature !== this.signature || height !== this.height) {
      this.signature = signature;
      this.height = height;
      this.draw();
    }
  }

  // ---------------------------------------------------------------- time

  get isStepped() {
    return this.windowMs < 2000 || this.reduced.matches;
  }

  get liveMs() {
    if (!this.clock) return 0;
    if (this.isStepped) return this.batches.newestMs;
    return this.clock.serverMs + performance.now() - this.clock.hereMs - this.lagMs;
  }

  get untilMs() {
    return this.pausedAtMs ?? this.liveMs;
  }

  pause(isPaused) {
    this.pausedAtMs = isPaused ? this.untilMs : null;
    const button = byId("pause");
    button.setAttribute("aria-pressed", String(isPaused));
    setText(button, isPaused ? "Go on" : "Pause");
    this.draw();
    this.#tell();
  }

  go(parts) {
    const newest = this.liveMs;
    const wanted = this.untilMs + parts * this.windowMs;
    if (wanted >= newest) this.pause(false);
    else {
      this.pausedAtMs = Math.max(newest - MINUTE_MS + this.windowMs, wanted);
      this.pause(true);
    }
  }

  zoom(steps) {
    const at = Math.min(WINDOWS.length - 1, Math.max(0, WINDOWS.indexOf(this.windowMs) + steps));
    this.windowMs = WINDOWS[at];
    byId("window").value = String(this.windowMs);
    this.draw();
    this.#tell();
  }

  #listen() {
    byId("pause").addEventListener("click", () => this.pause(this.pausedAtMs === null));
    byId("earlier").addEventListener("click", () => this.go(-0.5));
    byId("later").addEventListener("click", () => this.go(0.5));
    byId("window").addEventListener("change", (event) => {
      this.windowMs = Number(event.target.value);
      this.draw();
      this.#tell();
    });
    const keys = {
      " ": () => this.pause(this.pausedAtMs === null),
      ArrowLeft: () => this.go(-0.25),
      ArrowRight: () => this.go(0.25),
      Home: () => this.go(-MINUTE_MS),
      End: () => this.pause(false),
      "+": () => this.zoom(-1),
      "=": () => this.zoom(-1),
      "-": () => this.zoom(1),
    };
    this.stage.addEventListener("keydown", (event) => {
      const act = keys[event.key];
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      act();
    });
    this.stage.addEventListener("pointermove", (event) => this.#point(event));
    this.stage.addEventListener("pointerleave", () => (this.tip.hidden = true));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.recolour());
  }

  // ---------------------------------------------------------------- drawing

  recolour() {
    this.colours = [];
    this.draw();
  }

  #palette(context) {
    if (this.colours.length) return;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    this.ink = colour("--ink");
    this.muted = colour("--muted");
    this.line = colour("--line");
    this.panel = colour("--panel");
    this.bad = colour("--bad");
    this.font = getComputedStyle(document.body).fontFamily;
    for (let at = 0; at < 16; at += 1) {
      const plain = colour(`--m${at % 8}`);
      this.colours.push({ plain, fill: at < 8 ? plain : this.#stripes(context, plain, colour("--stripe")) });
    }
  }

  #stripes(context, plain, stripe) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const own = tile.getContext("2d");
    own.fillStyle = plain;
    own.fillRect(0, 0, 8, 8);
    own.strokeStyle = stripe;
    own.lineWidth = 2.5;
    for (const shift of [-8, 0, 8]) {
      own.beginPath();
      own.moveTo(shift, 8);
      own.lineTo(shift + 8, 0);
      own.stroke();
    }
    return context.createPattern(tile, "repeat");
  }

  #turn(at) {
    requestAnimationFrame((next) => this.#turn(next));
    if (at - this.drawnAt < FRAME_MS * (this.slowness ?? 1) || this.pausedAtMs !== null || this.isStepped || document.hidden) return;
    this.drawnAt = at;
    this.draw();
  }

  draw() {
    const began = performance.now();
    const width = this.stage.clientWidth;
    const height = this.height ?? 120;
    const scale = Math.min(2, devicePixelRatio || 1);
    if (!width) return;
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
      this.canvas.style.height = `${height}px`;
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    this.#palette(context);
    context.fillStyle = this.panel;
    context.fillRect(0, 0, width, height);
    this.left = width < 560 ? 62 : 118;
    this.perMs = (width - this.left - 8) / this.windowMs;
    this.fromMs = this.untilMs - this.windowMs;
    this.#axis(context, width, height);
    context.save();
    context.beginPath();
    context.rect(this.left, 0, width - this.left, height);
    context.clip();
    for (const row of this.rows) this.#row(context, row, width);
    context.restore();
    this.#labels(context, width);
    if (!this.rows.length) {
      context.fillStyle = this.muted;
      context.font = `13px ${this.font}`;
      context.fillText("No slice so far.", this.left, AXIS + 30);
    }
    // A host that is slow at drawing draws less often.
    this.slowness = Math.min(15, Math.max(1, Math.round((performance.now() - began) / 6)));
  }

  #axis(context, width, height) {
    const step = [10, 25, 50, 100, 250, 500, 1000, 2500, 5000].find((one) => one * this.perMs >= (width < 560 ? 62 : 78)) ?? 10000;
    context.font = `11px ${this.font}`;
    context.textBaseline = "middle";
    context.textAlign = "center";
    context.lineWidth = 1;
    // Lines that move with the batches: at whole steps of the clock.
    for (let at = Math.ceil(this.fromMs / step) * step; at <= this.untilMs; at += step) {
      const x = Math.round(this.left + (at - this.fromMs) * this.perMs) + 0.5;
      context.strokeStyle = this.line;
      context.beginPath();
      context.moveTo(x, AXIS);
      context.lineTo(x, height);
      context.stroke();
    }
    const isLive = this.pausedAtMs === null;
    for (let back = 0; back <= this.windowMs; back += step) {
      const x = this.left + (this.windowMs - back) * this.perMs;
      const behind = back + (isLive ? 0 : Math.max(0, this.liveMs - this.untilMs));
      const text = behind < 1 ? "now" : behind >= 1000 || this.windowMs >= 4000 ? `−${number(behind / 1000)} s` : `−${number(behind)} ms`;
      context.fillStyle = this.muted;
      context.textAlign = back === 0 ? "right" : "center";
      if (x - 20 > this.left || back === 0) context.fillText(text, back === 0 ? width - 4 : x, AXIS / 2);
    }
  }

  #row(context, row, width) {
    const middle = row.y + this.tall / 2;
    context.strokeStyle = this.line;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(this.left, Math.round(middle) + 0.5);
    context.lineTo(width, Math.round(middle) + 0.5);
    context.stroke();
    const top = row.y + 2;
    const tall = this.tall - 4;
    for (const batch of this.batches.within(row.slice, this.fromMs, this.untilMs)) {
      const x = this.left + (batch.fromMs - this.fromMs) * this.perMs;
      const wide = Math.max(1.2, (batch.untilMs - batch.fromMs) * this.perMs - (this.perMs > 0.05 ? 0.8 : 0));
      const colour = this.colours[batch.model % 16] ?? this.colours[0];
      const part = batch.size / (this.batches.largest.get(batch.model) || 1);
      const high = tall * (0.3 + 0.7 * part);
      const radius = Math.min(4, wide / 2.5);
      context.globalAlpha = 0.22;
      context.fillStyle = colour.plain;
      box(context, x, top, wide, tall, radius);
      context.globalAlpha = 1;
      context.fillStyle = colour.fill;
      box(context, x, top + tall - high, wide, high, Math.min(radius, high / 2));
      if (batch.isOdd) {
        context.strokeStyle = this.bad;
        context.lineWidth = 2;
        context.strokeRect(x + 1, top + 1, Math.max(1, wide - 2), tall - 2);
      }
      if (wide >= 26) this.#name(context, batch, x, wide, middle);
    }
  }

  #name(context, batch, x, wide, middle) {
    const size = `×${batch.size}`;
    const name = this.models.get(batch.model)?.id ?? "";
    context.font = `600 11px ${this.font}`;
    context.textAlign = "center";
    const full = name ? `${name} ${size}` : size;
    const text = context.measureText(full).width < wide - 8 ? full : size;
    const half = context.measureText(text).width / 2 + 3;
    if (2 * half > wide) return;
    context.fillStyle = this.panel;
    context.globalAlpha = 0.86;
    box(context, x + wide / 2 - half, middle - 7, 2 * half, 14, 4);
    context.globalAlpha = 1;
    context.fillStyle = this.ink;
    context.fillText(text, x + wide / 2, middle + 0.5);
  }

  #labels(context, width) {
    context.fillStyle = this.panel;
    context.fillRect(0, 0, this.left - 4, this.height);
    context.font = `12px ${this.font}`;
    context.textAlign = "left";
    context.textBaseline = "middle";
    for (const row of this.rows) {
      context.fillStyle = this.ink;
      context.fillText(width < 560 ? row.short : row.name, 6, row.y + this.tall / 2, this.left - 12);
      if (row.isFirst && row !== this.rows[0]) {
        context.strokeStyle = this.line;
        context.beginPath();
        context.moveTo(0, row.y - GPU_GAP / 2);
        context.lineTo(width, row.y - GPU_GAP / 2);
        context.stroke();
      }
    }
  }

  // ---------------------------------------------------------------- words

  #point(event) {
    const bounds = this.stage.getBoundingClientRect();
    const x = event.clientX - bounds.left;
    const y = event.clientY - bounds.top + this.stage.scrollTop;
    const row = this.rows.find((one) => y >= one.y && y < one.y + this.tall);
    const atMs = this.fromMs + (x - this.left) / this.perMs;
    const slack = 2 / this.perMs;
    const found = row && this.batches.within(row.slice, atMs - slack, atMs + slack).at(-1);
    this.tip.hidden = !found;
    if (!found) return;
    const model = this.models.get(found.model)?.id ?? "a model that is gone";
    setText(this.tip, `${model}, ${found.size} requests\n${ms(found.untilMs - found.fromMs)} on ${row.id}${found.isOdd ? "\nit failed" : ""}`);
    this.tip.style.left = `${Math.max(4, Math.min(x + 12, bounds.width - 180))}px`;
    this.tip.style.top = `${row.y + this.tall + 4}px`;
  }

  // For those who do not see the canvas: a sentence when something was asked for, and a table.
  #tell() {
    const fromMs = this.untilMs - this.windowMs;
    const rows = [];
    let count = 0;
    for (const row of this.rows) {
      const its = new Map();
      for (const batch of this.batches.within(row.slice, fromMs, this.untilMs)) {
        const sum = its.get(batch.model) ?? { count: 0, requests: 0, ranMs: 0, insideMs: 0 };
        sum.count += 1;
        sum.requests += batch.size;
        sum.ranMs += batch.untilMs - batch.fromMs;
        sum.insideMs += Math.min(batch.untilMs, this.untilMs) - Math.max(batch.fromMs, fromMs);
        its.set(batch.model, sum);
        count += 1;
      }
      for (const [model, sum] of its) rows.push({ key: `${row.id} ${model}`, slice: row.id, model, ...sum });
    }
    setText(byId("timeline-now"), `${count} batches on ${this.rows.length} slices in ${ms(this.windowMs)}${this.pausedAtMs === null ? "" : ", paused"}`);
    if (!byId("timeline").querySelector("details").open) return;
    keep(byId("timeline-rows"), rows.slice(0, 400), (row) => row.key, newRow, (child, row) => {
      setText(child.cells[0], row.slice);
      setText(child.name, this.models.get(row.model)?.id ?? "");
      setText(child.cells[2], String(row.count));
      setText(child.cells[3], number(row.requests / row.count));
      setText(child.cells[4], number(row.ranMs / row.count));
      setText(child.cells[5], percent(row.insideMs / this.windowMs));
    });
  }
}

function newRow(row) {
  const head = make("th", { scope: "row" });
  const name = make("span");
  const cells = [head, make("td", {}, swatch(row.model), name), ...[0, 1, 2, 3].map(() => make("td", { class: "n" }))];
  return { nodes: [make("tr", {}, ...cells)], cells, name };
}

function box(context, x, y, wide, high, radius) {
  if (radius < 1) context.fillRect(x, y, wide, high);
  else {
    context.beginPath();
    context.roundRect(x, y, wide, high, radius);
    context.fill();
  }
}
