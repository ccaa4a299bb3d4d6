// What canaries found: for each thing they measure a small chart of the GPUs' last readings, and a
// row for each GPU. Shown as soon as there is a reading.

import { get } from "./api.js";
import { byId, h, show } from "./dom.js";
import { duration, entityName, moment, UNKNOWN, utc } from "./format.js";

const ORDER = ["wrong", "regression", "failed", "suspect", "learning", "normal"];
const CLASSES = {
  wrong: "critical",
  failed: "failed",
  suspect: "warning",
  learning: "unknown",
};
const SEVERE = 0.05; // of a loss: its alert is critical
// By unit: what a value is multiplied with, and what is written after it.
const UNITS = {
  flops_per_second: [1e-12, "TFLOP/s"],
  bytes_per_second: [1e-9, "GB/s"],
  seconds: [1, "s"],
};
const AXIS = 64;
const HEIGHT = 130;
const NEAR = 0.25; // what is expected is drawn where it is no further off, a share
const SHIFTS = 3; // changes of the environment that are told under a chart
const ALIKE = 600; // seconds: readings of several GPUs that one change is told of once
const PALE = ["40", "33", "26", "20"]; // of bands, by the number of lines
const PALEST = "16";
const MOMENT = 0.001; // seconds: a band ends so long before that of another environment begins

/** Return the charts' data: what was measured alike, with its courses. */
function shapes(courses) {
  const found = new Map();
  for (const course of courses) {
    const name = shapeName(course);
    if (!found.has(name)) found.set(name, { name, canary: course.canary, courses: [] });
    found.get(name).courses.push(course);
  }
  return [...found.values()];
}

function shapeName({ canary, dtype, direction, size, gpus }) {
  const edge = size >= 2 ** 20 ? `${size / 2 ** 20} MiB` : size ? String(size) : "";
  const many = gpus > 1 ? `${gpus} GPUs` : "";
  return [canary, dtype, direction, edge, many].filter(Boolean).join(" ");
}

function written(value, unit) {
  if (value === null || value === undefined) return UNKNOWN;
  const [factor, word] = UNITS[unit];
  return `${Number((value * factor).toPrecision(4))}\u00a0${word}`;
}

const share = (ratio) => (typeof ratio === "number" ? `${(ratio * 100).toFixed(1)}\u00a0%` : UNKNOWN);
const hasResult = ({ result }) => result === "ok" || result === "wrong";

/** The section; asks for readings when the status says that there are others. */
export class Canaries {
  constructor(look, onFault) {
    this.look = look;
    this.onFault = onFault;
    this.courses = [];
    this.charts = new Map();
    this.known = "";
    this.asking = false;
    new ResizeObserver(() => this.draw()).observe(byId("canary-charts"));
  }

  /** Take in a status; `recording` is the name of the one that is shown, if any. */
  async follow(status, now, recording) {
    this.now = now;
    this.time = recording ? now : null;
    const known = recording ?? JSON.stringify(status.canaries ?? null);
    if (known !== this.known && !this.asking) {
      this.asking = true;
      try {
        const wanted = recording || status.canaries;
        const told = wanted ? await get("/api/v1/canaries", [["recording", recording ?? null]]) : {};
        this.courses = told.canaries ?? [];
        this.known = known;
      } catch (fault) {
        this.onFault(fault.message);
      } finally {
        this.asking = false;
      }
    }
    this.draw();
  }

  draw() {
    byId("canaries").hidden = !this.courses.length;
    const chosen = this.courses.filter(({ entity }) => this.look.isChosen(entity));
    const wanted = shapes(chosen);
    const before = new Map(this.charts);
    for (const { name } of wanted) before.delete(name);
    for (const [name, gone] of before) {
      gone.destroy();
      this.charts.delete(name);
    }
    for (const [place, shape] of wanted.entries()) {
      if (!this.charts.has(shape.name)) this.charts.set(shape.name, new Chart(shape.name, this.look));
      const chart = this.charts.get(shape.name);
      const there = byId("canary-charts").children[place];
      if (there !== chart.element) byId("canary-charts").insertBefore(chart.element, there ?? null);
      chart.draw(shape.courses, this.now, this.time);
    }
    const rank = ({ state }) => ORDER.indexOf(state);
    const rows = chosen.toSorted((a, b) => rank(a) - rank(b)).map((one) => this.row(one));
    show(byId("canary-rows"), rows);
  }

  row(course) {
    const newest = course.readings.findLast(hasResult);
    const last = course.readings.at(-1);
    const { expected } = course.environments[newest?.environment ?? 0];
    const ratio = newest?.value && expected?.value ? newest.value / expected.value : null;
    const title = expected ? `${written(expected.value, course.unit)}: ${expected.source}` : "";
    const cell = (name, ...content) => h("td", { "data-title": name }, content);
    return h(
      "tr",
      { "data-canary": course.canary, "data-entity": course.entity.join("/") },
      h("th", { scope: "row" }, this.look.swatch(course.entity), called(course)),
      cell("Canary", shapeName(course)),
      cell("Newest", h("b", {}, written(newest?.value, course.unit))),
      cell("Of baseline", share(newest?.ratio)),
      cell("Of expected", h("span", { title }, share(ratio))),
      cell("Age", h("span", { title: utc(last.time) }, age(this.now - last.time))),
      cell(
        "State",
        h("span", { class: `state ${stateClass(course)}` }, course.state),
        told(course),
        hasResult(last) ? "" : h("span", { class: "run" }, ` last run ${last.result}: ${last.detail}`),
      ),
    );
  }
}

/** Return the colour of a state: of a loss that of the alert it is. */
function stateClass({ state, loss, peers }) {
  if (state !== "regression") return CLASSES[state] ?? "ok";
  if (peers === "whole_node") return "info";
  return loss >= SEVERE ? "critical" : "warning";
}

/** Return what there is to say beside the state. */
function told({ state, text }) {
  return text.startsWith(`${state}: `) ? ` ${text.slice(state.length + 2)}` : "";
}

function called({ entity, uuid }) {
  return entity[1] && entity[1] === uuid ? uuid : entityName(entity);
}

function age(seconds) {
  if (seconds < 0) return "later";
  return seconds < 2 * 86400 ? duration(Math.floor(seconds)) : `${Math.floor(seconds / 86400)}\u00a0d`;
}

/** One small chart. */
class Chart {
  constructor(name, look) {
    this.look = look;
    this.readout = h("div", { class: "readout" });
    this.canvas = h("div", { class: "plot" });
    this.notes = h("div", { class: "notes" });
    this.unit = h("span", { class: "unit" });
    this.element = h(
      "figure",
      { class: "chart canary", "data-shape": name },
      h("figcaption", {}, h("h3", {}, name), this.unit, this.readout),
      this.canvas,
      this.notes,
    );
    this.plot = null;
    this.drawn = "";
  }

  destroy() {
    this.plot?.destroy();
    this.element.remove();
  }

  draw(courses, now, time) {
    const width = this.canvas.clientWidth;
    if (!width) return;
    this.now = now;
    this.time = time;
    const last = (one) => [one.entity, one.readings.length, one.readings.at(-1).time, one.text];
    const drawn = JSON.stringify([this.look.theme, width, courses.map(last)]);
    if (drawn === this.drawn) {
      if (time !== null) this.plot.redraw(false);
      return;
    }
    this.drawn = drawn;
    this.courses = courses;
    [this.factor] = UNITS[courses[0].unit];
    show(this.unit, UNITS[courses[0].unit][1]);
    this.prepare();
    this.plot?.destroy();
    this.plot = new window.uPlot(this.options(width), this.data, this.canvas);
    this.read(null);
    this.note();
  }

  /** Lay out the readings on one row of times; at a time of another GPU alone one is undefined. */
  prepare() {
    const ends = (one) => one.environments.slice(1).map(({ since }) => since - MOMENT);
    const own = (one) => [...one.readings.map(({ time }) => time), ...ends(one)];
    const times = [...new Set(this.courses.flatMap(own))].sort((a, b) => a - b);
    const places = new Map(times.map((time, place) => [time, place]));
    this.data = [times];
    const values = [];
    for (const course of this.courses) {
      const line = new Array(times.length).fill(undefined);
      const [high, low] = [0, 1].map(() => new Array(times.length).fill(null));
      for (const reading of course.readings) {
        if (!hasResult(reading) || reading.value === null) continue;
        values.push((line[places.get(reading.time)] = reading.value * this.factor));
      }
      for (const [number, { baseline, limit }] of course.environments.entries()) {
        const own = course.readings.filter(({ environment }) => environment === number);
        if (limit === null || !own.length) continue;
        const edges = [baseline * 2 - limit, limit].map((one) => one * this.factor);
        const [first, last] = [own[0], own.at(-1)].map(({ time }) => places.get(time));
        high.fill(Math.max(...edges), first, last + 1);
        low.fill(Math.min(...edges), first, last + 1);
        for (const end of ends(course)) high[places.get(end)] = low[places.get(end)] = null;
        values.push(...edges);
      }
      this.data.push(high, low, line);
    }
    const known = values.filter((one) => typeof one === "number");
    let [least, most] = known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
    const expected = this.courses.map((course) => course.environments.at(-1).expected?.value);
    this.expected = [...new Set(expected.filter((one) => typeof one === "number"))]
      .map((one) => one * this.factor)
      .filter((one) => one > least * (1 - NEAR) && one < most * (1 + NEAR));
    least = Math.min(least, ...this.expected);
    most = Math.max(most, ...this.expected);
    const room = (most - least) * 0.12 || most * 0.05 || 1;
    this.range = [Math.max(0, least - room), most + room];
    this.shifts = shifts(this.courses);
  }

  options(width) {
    const { look } = this;
    const series = [{}];
    const bands = [];
    const pale = PALE[this.courses.length - 1] ?? PALEST;
    for (const { entity } of this.courses) {
      const { color, dash } = look.colour(entity);
      bands.push({ series: [series.length, series.length + 1], fill: color + pale });
      const edge = { stroke: `${color}55`, width: 0.5, points: { show: false } };
      series.push({ ...edge }, { ...edge });
      series.push({ stroke: color, width: 1.2, dash, points: { show: true, size: 4, fill: color } });
    }
    const grid = { stroke: look.css("--grid"), width: 1 };
    const axis = { stroke: look.css("--dim"), font: look.font, grid, ticks: { show: false } };
    return {
      width,
      height: HEIGHT,
      padding: [6, 8, 0, 0],
      legend: { show: false },
      series,
      bands,
      scales: { x: { range: (_, low, high) => span(low, high) }, y: { range: () => this.range } },
      axes: [
        {
          ...axis,
          size: 24,
          space: 100,
          values: (_, splits) => splits.map((one) => this.when(one)),
        },
        { ...axis, size: AXIS, space: 28, values: (_, splits) => numbers(splits) },
      ],
      cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
      hooks: {
        setCursor: [(plot) => this.read(plot.cursor.left >= 0 ? plot.cursor.idx : null)],
        draw: [(plot) => this.drawMarks(plot)],
      },
    };
  }

  /** Return a time to the minute, without the year. */
  when(seconds) {
    return moment(seconds, this.now).slice(0, -3).replace(/^\d+-/, "");
  }

  /** Write the readings that are nearest to a place, else the newest ones. */
  read(place) {
    if (!this.data) return;
    const when = place === null ? Infinity : this.data[0][place];
    const nearest = ({ readings }) =>
      place === null
        ? readings.findLast(hasResult)
        : readings.reduce((a, b) => (Math.abs(b.time - when) < Math.abs(a.time - when) ? b : a));
    show(
      this.readout,
      this.courses.map((course) => {
        const reading = nearest(course);
        const value = reading?.value;
        const known = typeof value === "number";
        const text = known ? Number((value * this.factor).toPrecision(4)) : UNKNOWN;
        return h(
          "span",
          { class: "key", title: reading ? utc(reading.time) : "" },
          this.look.swatch(course.entity),
          h("span", { class: "of" }, course.entity[1] || course.entity[0]),
          h("span", { class: "number" }, String(text)),
          known && typeof reading.ratio === "number" ? ` ${share(reading.ratio)}` : "",
        );
      }),
      place === null ? null : h("span", { class: "dim" }, this.when(when)),
    );
  }

  /** Say in words what is marked in the chart. */
  note() {
    const bad = this.courses.flatMap((course) =>
      course.readings
        .filter(({ result }) => result === "wrong" || result === "failed")
        .map((reading) => ({ ...reading, of: called(course) })),
    );
    show(
      this.notes,
      bad.slice(-SHIFTS).map(({ time, result, of, detail }) =>
        h(
          "p",
          { class: result === "wrong" ? "wrong" : "failed" },
          `${result === "wrong" ? "✕ wrong result" : "□ failed"}, ${of}, ${this.when(time)}`,
          detail ? `: ${detail}` : "",
        ),
      ),
      this.shifts
        .slice(-SHIFTS)
        .map(({ time, text }) => h("p", { class: "dim" }, `┊ ${this.when(time)} ${text}`)),
    );
  }

  drawMarks(plot) {
    const { ctx, bbox } = plot;
    const ratio = window.devicePixelRatio;
    const { look } = this;
    const right = bbox.left + bbox.width;
    const stroke = (colour, width, dash, ...points) => {
      ctx.strokeStyle = look.css(colour);
      ctx.lineWidth = width * ratio;
      ctx.setLineDash(dash.map((one) => one * ratio));
      ctx.beginPath();
      points.forEach(([x, y], place) => (place % 2 ? ctx.lineTo(x, y) : ctx.moveTo(x, y)));
      ctx.stroke();
    };
    const upright = (seconds, ...how) => {
      const x = plot.valToPos(seconds, "x", true);
      if (x >= bbox.left && x <= right) stroke(...how, [x, bbox.top], [x, bbox.top + bbox.height]);
    };
    ctx.save();
    for (const { time } of this.shifts) upright(time, "--dim", 1, [2, 3]);
    if (this.time !== null) upright(this.time, "--time", 2, []);
    for (const value of this.expected) {
      const y = plot.valToPos(value, "y", true);
      stroke("--limit", 1, [6, 4], [bbox.left, y], [right, y]);
      ctx.setLineDash([]);
      ctx.font = look.font.replace(/\d+px/, `${11 * ratio}px`);
      ctx.textAlign = "left";
      ctx.lineWidth = 4 * ratio;
      ctx.strokeStyle = look.css("--back");
      ctx.fillStyle = look.css("--limit");
      const base = y - bbox.top < 16 * ratio ? y + 13 * ratio : y - 4 * ratio;
      ctx.strokeText("expected", bbox.left + 4 * ratio, base);
      ctx.fillText("expected", bbox.left + 4 * ratio, base);
    }
    for (const { readings } of this.courses) {
      for (const { time, value, result } of readings) {
        if (result !== "wrong" && result !== "failed") continue;
        const x = plot.valToPos(time, "x", true);
        const known = typeof value === "number";
        const y = known ? plot.valToPos(value * this.factor, "y", true) : bbox.top + bbox.height - 8 * ratio;
        const r = 5 * ratio;
        if (result === "wrong") {
          stroke("--critical", 2.5, [], [x - r, y - r], [x + r, y + r], [x - r, y + r], [x + r, y - r]);
        } else {
          ctx.strokeStyle = look.css("--failed");
          ctx.setLineDash([]);
          ctx.lineWidth = 2 * ratio;
          ctx.strokeRect(x - r, y - r, 2 * r, 2 * r);
        }
      }
    }
    ctx.restore();
  }
}

/** Return numbers of an axis, all with the digits that the longest needs. */
function numbers(splits) {
  const digits = (one) => String(Number(one.toFixed(6))).split(".")[1]?.length ?? 0;
  const most = Math.max(...splits.map(digits));
  return splits.map((one) => one.toFixed(most));
}

/** Return the time that a chart shows: all readings, or an hour around a single one. */
function span(low, high) {
  const room = high > low ? (high - low) * 0.02 : 1800;
  return [low - room, high + room];
}

/** Return when the environment of some courses became another, and what of it. */
function shifts(courses) {
  const found = [];
  for (const { environments } of courses) {
    for (let place = 1; place < environments.length; place++) {
      const [old, now] = [environments[place - 1].settings, environments[place].settings];
      const names = [...new Set([...Object.keys(old), ...Object.keys(now)])].sort();
      const text = names
        .filter((name) => old[name] !== now[name])
        .map((name) => `${name.replaceAll("_", " ")} ${old[name] ?? "?"} → ${now[name] ?? "?"}`)
        .join(", ");
      const time = environments[place].since;
      if (!found.some((one) => one.text === text && Math.abs(one.time - time) < ALIKE)) {
        found.push({ time, text });
      }
    }
  }
  return found.sort((a, b) => a.time - b.time);
}
