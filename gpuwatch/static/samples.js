// What charts show, on one grid of steps: asked for once, then only what is new of it.

import { get } from "./api.js";
import { columnParts } from "./format.js";

const STATISTICS = ["min", "mean", "max"];
const LATEST_SECONDS = 10; // by which a sampler may come after the others

const known = (value) => value !== null;

export class Samples {
  constructor() {
    this.blocks = new Map(); // by signal: the grid, up to which step all is known, and the series
    this.recording = null;
    this.late = new Map();
    this.loading = false; // whether a signal is fetched of which nothing is known on the grid
    this.sources = new Set(); // where what is shown came from: ring, history, recording
    this.abort = null;
  }

  /** Forget everything: other entities are wanted. */
  clear() {
    this.stop();
    this.blocks.clear();
  }

  /** End what is being fetched: something else is wanted. */
  stop() {
    this.abort?.abort();
  }

  /**
   * Fetch what is missing of `signals` on `grid`: names, with the seconds by which each is late.
   * `entities` are `kind/id`, null is all.
   */
  async fetch(signals, entities, grid) {
    this.late = signals;
    const whole = [];
    const tail = [];
    let since = Infinity;
    for (const signal of signals.keys()) {
      const from = this._missing(this.blocks.get(signal), grid);
      if (from === grid.first) whole.push(signal);
      else if (from !== null) {
        tail.push(signal);
        since = Math.min(since, from); // one request for all, though some are less late
      }
    }
    const abort = (this.abort = new AbortController());
    const ask = (names, from) => names.length && this._ask(names, entities, grid, from, abort);
    this.loading = whole.some((signal) => !this._overlaps(this.blocks.get(signal), grid));
    try {
      await Promise.all([ask(whole, grid.first), ask(tail, since)]);
    } finally {
      this.loading = false;
    }
  }

  /** Return [{entity, name, min, mean, max}] of a signal on `grid`; nulls where nothing is known. */
  series(signal, grid) {
    const block = this.blocks.get(signal);
    if (!block || block.step !== grid.step) return [];
    const shift = grid.first - block.first;
    return [...block.series.values()].map((one) => {
      const moved = { entity: one.entity, name: one.name };
      for (const key of STATISTICS) moved[key] = slide(one[key], shift, grid.count);
      return moved;
    });
  }

  _overlaps(block, grid) {
    if (block?.step !== grid.step) return false;
    return grid.first >= block.first && grid.first < block.first + block.count;
  }

  _missing(block, grid) {
    const end = grid.first + grid.count;
    if (!block || block.step !== grid.step) return grid.first;
    if (grid.first < block.first || grid.first > block.filled) return grid.first;
    return block.filled < end ? Math.max(grid.first, block.filled) : null;
  }

  async _ask(signals, entities, grid, from, abort) {
    const end = grid.first + grid.count;
    const answer = await get(
      "/api/v1/series",
      [
        ...signals.map((signal) => ["signal", signal]),
        ...(entities ?? []).map((entity) => ["entity", entity]),
        ["start", (from * grid.step).toFixed(3)],
        ["end", (end * grid.step).toFixed(3)],
        ["points", end - from],
        ["recording", this.recording],
      ],
      abort.signal,
    );
    if (from === grid.first) this.sources.clear();
    for (const source of answer.source.split("+").filter(Boolean)) this.sources.add(source);
    for (const signal of signals) {
      const block = this._moved(signal, grid);
      for (const one of answer.series) {
        if (one.name === signal || columnParts(one.name).stem === signal) {
          this._put(block, one, answer, from);
        }
      }
      const until = (answer.until ?? answer.end) - this.late.get(signal);
      block.filled = this._filled(block, Math.min(until, end * grid.step), from);
    }
  }

  /** Return up to which step a block needs not be asked for again: samplers may be late. */
  _filled(block, until, from) {
    const step = (seconds) => Math.floor(seconds / block.step + 1e-3);
    const newest = [...block.series.values()].map(({ mean }) => mean.findLastIndex(known));
    const reached = block.first + Math.max(-1, ...newest); // maybe not whole yet
    const surely = Math.max(reached, step(until - LATEST_SECONDS));
    return Math.max(from, Math.min(step(until), surely));
  }

  /** Return the signal's block on this grid, with what is known of it already. */
  _moved(signal, grid) {
    const before = this.blocks.get(signal);
    const kept = before?.step === grid.step ? this.series(signal, grid) : [];
    const block = { ...grid, filled: grid.first, series: new Map() };
    for (const one of kept) block.series.set(key(one), one);
    this.blocks.set(signal, block);
    return block;
  }

  /** Write one answered series into a block; a coarser answer counts for each step it covers. */
  _put(block, told, answer, from) {
    const ratio = block.step / answer.step;
    const offset = (from * block.step - answer.start) / answer.step;
    let one = block.series.get(key(told));
    if (!one) {
      one = { entity: told.entity, name: told.name };
      for (const statistic of STATISTICS) one[statistic] = new Array(block.count).fill(null);
      block.series.set(key(told), one);
    }
    for (let step = from; step < block.first + block.count; step++) {
      const place = Math.floor((step - from + 0.5) * ratio + offset);
      for (const statistic of STATISTICS) {
        one[statistic][step - block.first] = told[statistic]?.[place] ?? null;
      }
    }
  }
}

function key(one) {
  return `${one.entity.join("/")} ${one.name}`;
}

/** Return `count` values of which the first was at `shift`; null where there was none. */
function slide(values, shift, count) {
  if (shift === 0 && values.length === count) return values;
  const moved = new Array(count).fill(null);
  for (let place = Math.max(0, -shift); place < count && place + shift < values.length; place++) {
    moved[place] = values[place + shift];
  }
  return moved;
}
