// How things look in all charts alike: colours of entities, which are chosen, limits and marks.

import { h } from "./dom.js";
import { wall } from "./status.js";

const COLOURS = 8; // beyond them the same again, dashed
const FEW = 4;
const RATE_SECONDS = 5; // a few steps of training: what flows in bursts has a mean
const DIRECTIONS = ["received", "transmitted"];
const portBytes = (direction) => `rdma_port_data_${direction}_bytes_total`;

export class Look {
  constructor() {
    this.chosen = null; // ids of GPUs, null is all
    this.limitsOf = new Map(); // by GPU: names and values
    this.numbers = new Map(); // by entity: its place in the order of colours
    this.near = new Map(); // by port: the GPU it sits beside
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.marks = [];
    this.selected = (series) => this.isChosen(series.entity);
    this._styles();
  }

  onTheme(call) {
    this.dark.addEventListener("change", () => (this._styles(), call()));
  }

  _styles() {
    this.values = new Map();
    this.theme = this.dark.matches ? "dark" : "light";
    this.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  }

  /** Return a colour of the style sheet. */
  css(name) {
    if (!this.values.has(name)) {
      this.values.set(
        name,
        getComputedStyle(document.documentElement).getPropertyValue(name).trim(),
      );
    }
    return this.values.get(name);
  }

  /** Take in what a status says of GPUs and ports. */
  learn(status) {
    for (const { gpu, values } of status.gpus) {
      this.numbers.set(`gpu,${gpu}`, Number(gpu)); // whichever others there are
      this.limitsOf.set(gpu, values);
    }
    for (const { device, port, gpu } of status.ports ?? []) {
      this.near.set(`${device}/${port}`, gpu);
    }
  }

  /** Return the place of an entity among its kind; a port has that of its GPU. */
  order([kind, id]) {
    const gpu =
      kind === "rdma_port" ? this.near.get(id) : kind === "gpu_instance" ? id.split("/")[0] : null;
    const known = this.numbers.get(gpu ? `gpu,${gpu}` : `${kind},${id}`);
    if (known !== undefined) return known;
    const others = [...this.numbers.keys()].filter((key) => key.startsWith(`${kind},`)).length;
    this.numbers.set(`${kind},${id}`, others);
    return others;
  }

  colour(entity) {
    const place = this.order(entity);
    return {
      color: this.css(`--line-${place % COLOURS}`),
      dash: place % 16 >= COLOURS ? [5, 3] : undefined,
    };
  }

  /** Return a patch of an entity's colour, hollow where its line is dashed. */
  swatch(entity) {
    const { color, dash } = this.colour(entity);
    return h("i", { class: dash ? "swatch hollow" : "swatch", style: { color } });
  }

  /** Choose one GPU alone, or all if it was that; with `more` add it or take it away. */
  pick(gpu, more, all) {
    if (more) {
      const chosen = new Set(this.chosen ?? []);
      if (!chosen.delete(gpu)) chosen.add(gpu);
      this.chosen = chosen.size && chosen.size < all.length ? chosen : null;
    } else {
      const alone = this.chosen?.size === 1 && this.chosen.has(gpu);
      this.chosen = alone ? null : new Set([gpu]);
    }
  }

  isChosen([kind, id]) {
    if (!this.chosen) return true;
    if (kind === "gpu") return this.chosen.has(id);
    if (kind === "gpu_instance") return this.chosen.has(id.split("/")[0]);
    return kind !== "rdma_port" || !this.near.get(id) || this.chosen.has(this.near.get(id));
  }

  /** Return what to ask for of these signals, as `kind/id`; null is everything. */
  entities(columns, signals) {
    if (!this.chosen) return null;
    const wanted = columns
      // Of ports all are asked for: their table shows each one's rates.
      .filter(({ entity }) => entity[0] === "rdma_port" || this.isChosen(entity))
      .filter(({ name }) => signals.some((one) => one === name || name.startsWith(`${one}{`)))
      .map(({ entity }) => entity.join("/"));
    return [...new Set(wanted)];
  }

  /** Return the limits of the chosen GPUs, one line where they are alike. */
  limits(names, lines) {
    const found = [];
    for (const [name, text] of Object.entries(names)) {
      const byValue = new Map();
      for (const { entity } of lines) {
        const value = this.limitsOf.get(entity[1])?.[name];
        if (typeof value === "number") byValue.set(value, entity);
      }
      for (const [value, entity] of byValue) {
        found.push({
          value,
          text,
          entity: byValue.size > 1 && byValue.size <= FEW ? entity : null,
        });
      }
    }
    return found;
  }

  /** Take in which time is shown, and what is marked in it. */
  view(timeline, status, replay) {
    this.start = timeline.start;
    this.end = timeline.end;
    this.marks = (status?.alerts ?? []).map((alert) => ({
      seconds: wall(status, alert.since_ns),
      kind: alert.severity,
    }));
    this.time = replay?.time ?? null; // the moment of a recording that is looked at
    if (replay) this.marks.push({ seconds: this.time, kind: "time" });
  }

  /** Return the mean rate of each port and direction over the last seconds that are known. */
  portRates(samples, grid) {
    const rates = new Map();
    const { time } = this;
    const end = time === null ? grid.count : Math.floor(time / grid.step) - grid.first + 1;
    for (const direction of DIRECTIONS) {
      for (const { entity, mean } of samples.series(portBytes(direction), grid)) {
        const before = mean.slice(0, Math.max(end, 0));
        const newest = before.findLastIndex((one) => one !== null);
        const start = newest - Math.ceil(RATE_SECONDS / grid.step);
        const known = before
          .slice(Math.max(start + 1, 0), newest + 1)
          .filter((one) => one !== null);
        if (!known.length) continue;
        const rate = known.reduce((sum, one) => sum + one, 0) / known.length;
        rates.set(`${entity[1]} ${direction}`, rate);
      }
    }
    return rates;
  }
}
