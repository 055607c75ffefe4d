// The batches of the last minute, by slice: within bounds, however long the page stays open.

const KEPT_MS = 62_000;
const BATCHES_MAX = 40_000;

export class Batches {
  constructor() {
    this.slices = new Map(); // number -> batches in order of their begin
    this.largest = new Map(); // model number -> the largest batch of it that is kept
    this.count = 0;
    this.leftOut = 0; // of the minute: seconds had more than an answer holds
    this.cuts = []; // [when, how many were left out], in their order
    this.newestMs = 0;
  }

  // A page that was served anew gives other numbers.
  clear() {
    this.slices.clear();
    this.count = 0;
    this.leftOut = 0;
    this.cuts = [];
    this.newestMs = 0;
  }

  add(frames) {
    for (const frame of frames) {
      if (frame.left_out) this.cuts.push([frame.until_ms, frame.left_out]);
      for (const [slice, model, fromMs, execMs, size, isOdd] of frame.batches) {
        let row = this.slices.get(slice);
        if (!row) this.slices.set(slice, (row = []));
        const batch = { model, fromMs, untilMs: fromMs + execMs, size, isOdd: isOdd === 1 };
        let at = row.length;
        while (at > 0 && row[at - 1].fromMs > fromMs) at -= 1; // they come in order of their ends
        row.splice(at, 0, batch);
        this.count += 1;
        if (batch.untilMs > this.newestMs) this.newestMs = batch.untilMs;
      }
    }
    this.#prune();
    const { until_ms: nowMs } = frames.at(-1);
    this.cuts = this.cuts.filter(([atMs]) => atMs >= nowMs - KEPT_MS);
    this.leftOut = this.cuts.reduce((sum, [, count]) => sum + count, 0);
  }

  #prune() {
    let before = this.newestMs - KEPT_MS;
    if (this.count > BATCHES_MAX) {
      const begins = [...this.slices.values()].flatMap((row) => row.map((batch) => batch.fromMs)).sort((a, b) => a - b);
      before = Math.max(before, begins[this.count - BATCHES_MAX]);
    }
    this.count = 0;
    this.largest.clear();
    for (const [slice, row] of this.slices) {
      let gone = 0;
      while (gone < row.length && row[gone].untilMs < before) gone += 1;
      if (gone) row.splice(0, gone);
      this.count += row.length;
      for (const { model, size } of row) if (size > (this.largest.get(model) ?? 0)) this.largest.set(model, size);
      if (!row.length) this.slices.delete(slice);
    }
  }

  // Those of a slice that ran at some moment of a span.
  within(slice, fromMs, untilMs) {
    const row = this.slices.get(slice) ?? [];
    let low = 0;
    let high = row.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row[middle].fromMs < untilMs) low = middle + 1;
      else high = middle;
    }
    const found = [];
    for (let at = low - 1; at >= 0 && found.length < 4000; at -= 1) {
      const batch = row[at];
      if (batch.untilMs < fromMs) {
        if (batch.fromMs < fromMs - 10_000) break; // no batch takes longer than that beside others
        continue;
      }
      found.push(batch);
    }
    return found.reverse();
  }
}
