// One chart: mean lines within the band from minimum to maximum, limits, marks, and the reasons
// for a low clock as lanes under it. uPlot draws; it knows nothing of where data comes from.

import { h, show } from "./dom.js";
import { clock, columnParts, entityName, quantity, scale, UNKNOWN } from "./format.js";
import { drawLanes } from "./lanes.js";

const AXIS = 64; // pixels for the numbers at the left, the same in all charts
const LABEL = 60; // pixels of a time under the axis
const RECENT = 1; // seconds
const MORE = 4; // lines from which on bands are drawn paler

export class Plot {
  /** `actions` has zoomTo(start, end), back() and point(seconds or null, clicked). */
  constructor(chart, actions) {
    this.chart = chart;
    this.actions = actions;
    this.readout = h("div", { class: "readout" });
    this.canvas = h("div", { class: "plot" });
    this.lanes = h("div", { class: "lanes" });
    this.unit = h("span", { class: "unit" });
    this.element = h(
      "figure",
      { class: "chart", id: `chart-${chart.id}`, "data-chart": chart.id },
      h("figcaption", {}, h("h3", {}, chart.title), this.unit, this.readout),
      this.canvas,
      this.lanes,
    );
    this.plot = null;
    this.signature = "";
    this.lines = [];
    this.seen = false;
  }

  /** The signals to fetch, each with the seconds by which it is late. */
  get signals() {
    const { signals, down, lanes, late } = this.chart;
    return [...[...signals, ...down].map((name) => [name, late]), ...(lanes ? [[lanes, 0]] : [])];
  }

  /** Draw what `samples` has on `grid`; `look` tells view, limits, marks, colours and selection. */
  draw(samples, grid, look) {
    this.look = look;
    this.grid = grid;
    const of = (names, sign) =>
      names.flatMap((name) =>
        samples
          .series(name, grid)
          .filter(look.selected)
          .map((one) => ({ ...one, sign })),
      );
    this.lines = [...of(this.chart.signals, 1), ...of(this.chart.down, -1)].sort(
      (a, b) => look.order(a.entity) - look.order(b.entity),
    );
    this._extent();
    const width = this.canvas.clientWidth;
    if (!width) return;
    const signature = [
      look.theme,
      ...this.lines.map((one) => `${one.entity} ${one.name} ${one.sign} ${look.order(one.entity)}`),
    ].join("\n");
    if (signature !== this.signature || !this.plot) this._build(width, signature);
    else if (this.plot.width !== width) this.plot.setSize({ width, height: this._height() });
    this.plot.setData(this._data());
    this._read(this.plot.cursor.left >= 0 ? this.plot.cursor.idx : null);
    if (this.chart.lanes) {
      const rows = samples.series(this.chart.lanes, grid).filter(look.selected);
      drawLanes(this.lanes, rows, grid, look, [AXIS, width]);
    }
  }

  destroy() {
    this.plot?.destroy();
    this.element.remove();
  }

  _height() {
    return window.innerWidth < 700 ? 130 : 160;
  }

  _data() {
    const { step, first, count } = this.grid;
    const times = Array.from({ length: count }, (_, place) => (first + place + 0.5) * step);
    const turned = (values, sign) =>
      sign > 0 ? values : values.map((one) => (one === null ? null : -one));
    const rows = this.lines.flatMap((one) =>
      this.chart.envelope
        ? [turned(one.max, one.sign), turned(one.min, one.sign), turned(one.mean, one.sign)]
        : [turned(one.mean, one.sign)],
    );
    return [times, ...(rows.length ? rows : [times.map(() => null)])];
  }

  /** Find what the axis must show: all values, and the limits that are near enough. */
  _extent() {
    let [low, high] = [Infinity, -Infinity];
    for (const { min, max, sign } of this.lines) {
      for (const value of max) if (value !== null) high = Math.max(high, value * sign);
      for (const value of min) if (value !== null) low = Math.min(low, value * sign);
      if (sign < 0) for (const value of max) if (value !== null) low = Math.min(low, -value);
    }
    this.marks = this.look.limits(this.chart.limits, this.lines);
    for (const { value } of this.marks) high = Math.max(high, value);
    this.known = high !== -Infinity;
    if (!this.known) high = this.chart.top ?? 1;
    const floating = this.chart.floating && low !== Infinity;
    if (low === Infinity) low = 0;
    if (floating) [low, high] = [Math.floor(low - 2), high + (high - low) * 0.2 + 1];
    else {
      high = this.chart.top ?? (high <= 0 ? (low < 0 ? 0 : 1) : high * 1.06);
      low = low < 0 ? low * 1.06 : 0;
    }
    this.range = low < high ? [low, high] : [low, low + 1];
    this.scale = scale(this.chart.unit, Math.max(Math.abs(low), Math.abs(high)));
    const both = this.chart.down.length ? "received above, sent below 0" : "";
    show(this.unit, [this.scale.unit, both].filter(Boolean).join(", "));
  }

  _build(width, signature) {
    this.plot?.destroy();
    this.signature = signature;
    const { look } = this;
    const pale = this.lines.length > MORE ? "2e" : "4d";
    const series = [{}];
    const bands = [];
    for (const { entity } of this.lines) {
      const { color, dash } = look.colour(entity);
      if (this.chart.envelope) {
        bands.push({ series: [series.length, series.length + 1], fill: color + pale });
        const edge = { stroke: `${color}66`, width: 0.5, points: { show: false } };
        series.push({ ...edge }, { ...edge });
      }
      series.push({
        stroke: color,
        width: this.lines.length > MORE ? 1 : 1.5,
        dash,
        points: { size: 3, fill: color, filter: alone },
      });
    }
    if (!this.lines.length) series.push({ scale: "y" }); // uPlot has no pointer without a line
    const grid = { stroke: look.css("--grid"), width: 1 };
    const axis = { stroke: look.css("--dim"), font: look.font, grid, ticks: { show: false } };
    const options = {
      width,
      height: this._height(),
      padding: [6, 8, 0, 0],
      legend: { show: false },
      series,
      bands,
      scales: {
        x: { range: () => [this.look.start, this.look.end] },
        y: { range: () => this.range },
      },
      axes: [
        {
          ...axis,
          size: 24,
          space: 90,
          values: (_, splits, __, ___, by) => this._times(splits, by),
        },
        {
          ...axis,
          size: AXIS,
          space: 28,
          values: (_, splits) => splits.map((one) => (this.known ? this._number(one) : "")),
        },
      ],
      cursor: {
        y: false,
        points: { show: this.lines.length <= 2 * MORE, size: 5 },
        drag: { x: true, y: false, setScale: false, dist: 4 },
        // Only where the pointer is is shared; a drag in one chart is its own.
        sync: {
          key: "time",
          filters: { pub: (type) => type === "mousemove" || type === "mouseleave" },
        },
        bind: { dblclick: () => () => (this.actions.back(), null) },
      },
      hooks: {
        setSelect: [(plot) => this._zoom(plot)],
        setCursor: [(plot) => this._point(plot)],
        draw: [(plot) => (this._drawLimits(plot), this._drawMarks(plot))],
        ready: [(plot) => plot.over.addEventListener("click", () => this._click(plot))],
      },
    };
    this.plot = new window.uPlot(options, this._data(), this.canvas);
  }

  /** Return what is written at these times; nothing where it would be cut off. */
  _times(splits, step) {
    const { start, end } = this.look;
    const near = ((end - start) * LABEL) / (2 * this.canvas.clientWidth);
    return splits.map((time) => (end - time < near ? "" : clock(time, step)));
  }

  _number(value) {
    const { factor, digits } = this.scale;
    const number = Math.abs(value) * factor;
    return Number.isInteger(number) ? String(number) : number.toFixed(Math.max(digits, 1));
  }

  _zoom(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    const [start, end] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.dragged = true;
    this.actions.zoomTo(start, end);
  }

  _click(plot) {
    if (!this.dragged) this.actions.point(plot.posToVal(plot.cursor.left, "x"), true);
    this.dragged = false;
  }

  _point(plot) {
    const { idx, left } = plot.cursor;
    this._read(left >= 0 ? idx : null);
    const here = left >= 0 && plot.cursor.event?.type === "mousemove";
    if (here) this.actions.point(plot.posToVal(left, "x"), false);
    else if (left < 0) this.actions.point(null, false);
  }

  /** Write the values at a place, else those of the recording's moment or the newest known ones. */
  _read(pointed) {
    const entities = new Map();
    const { time } = this.look;
    const chosen = time === null ? null : Math.floor(time / this.grid.step) - this.grid.first;
    const place = pointed ?? (chosen >= 0 && chosen < this.grid.count ? chosen : null);
    const newest = this.lines.map(({ mean }) => mean.findLastIndex((value) => value !== null));
    // What ended long before the others is not known now.
    const since = Math.max(...newest) - Math.max(2, (RECENT + this.chart.late) / this.grid.step);
    for (const [row, one] of this.lines.entries()) {
      const at = place ?? (newest[row] >= since ? newest[row] : -1);
      const number = (value) => quantityIn(this.scale, value);
      const [low, mean, high] = [one.min[at], one.mean[at], one.max[at]].map(number);
      const text = place !== null && low !== high ? `${mean} (${low}…${high})` : mean;
      const arrow = this.chart.down.length ? (one.sign > 0 ? "↓" : "↑") : "";
      const label = columnParts(one.name).label;
      const word = this.chart.more && label ? `${label} ` : "";
      const id = String(one.entity);
      entities.set(id, [...(entities.get(id) ?? []), `${word}${arrow}${text}`]);
    }
    show(
      this.readout,
      [...entities].map(([id, texts]) => {
        const entity = id.split(/,(.*)/s).slice(0, 2);
        const name = entity[0] === "gpu" ? entity[1] : entity[1] || entity[0];
        return h(
          "span",
          { class: "key", title: entityName(entity) },
          this.look.swatch(entity),
          h("span", { class: "of" }, name),
          h("span", { class: "number" }, texts.join(" ")),
        );
      }),
    );
  }

  _drawLimits(plot) {
    const { ctx, bbox } = plot;
    const ratio = window.devicePixelRatio;
    let right = bbox.left + bbox.width - 2 * ratio;
    ctx.save();
    ctx.font = this.look.font.replace(/\d+px/, `${11 * ratio}px`);
    ctx.textAlign = "right";
    for (const { value, text, entity } of this.marks.sort((a, b) => b.value - a.value)) {
      const y = plot.valToPos(value, "y", true);
      if (y < bbox.top - 1 || y > bbox.top + bbox.height) continue;
      ctx.strokeStyle = entity ? this.look.colour(entity).color : this.look.css("--limit");
      ctx.lineWidth = ratio;
      ctx.setLineDash([6 * ratio, 4 * ratio]);
      line(ctx, bbox.left, y, bbox.left + bbox.width, y);
      // The words stand out from lines behind them, and beside those of other limits.
      const words = `${text} ${quantity(value, this.chart.unit)}`;
      ctx.setLineDash([]);
      ctx.lineWidth = 4 * ratio;
      ctx.strokeStyle = this.look.css("--back");
      ctx.fillStyle = this.look.css("--limit");
      const below = y - bbox.top < 16 * ratio || right < bbox.left + bbox.width - 2 * ratio;
      const base = below ? y + 13 * ratio : y - 4 * ratio;
      ctx.strokeText(words, right, base);
      ctx.fillText(words, right, base);
      right -= ctx.measureText(words).width + 10 * ratio;
    }
    ctx.restore();
  }

  _drawMarks(plot) {
    const { ctx, bbox } = plot;
    const ratio = window.devicePixelRatio;
    ctx.save();
    for (const { seconds, kind } of this.look.marks) {
      const x = plot.valToPos(seconds, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = this.look.css(`--${kind}`);
      ctx.lineWidth = (kind === "time" ? 2 : 1) * ratio;
      ctx.setLineDash(kind === "time" ? [] : [2 * ratio, 3 * ratio]);
      line(ctx, x, bbox.top, x, bbox.top + bbox.height);
    }
    ctx.restore();
  }
}

function line(ctx, x0, y0, x1, y1) {
  ctx.beginPath();
  ctx.moveTo(x0, y0);
  ctx.lineTo(x1, y1);
  ctx.stroke();
}

function quantityIn({ factor, digits }, value) {
  if (value === null || value === undefined) return UNKNOWN;
  return (value * factor).toFixed(digits);
}

/** Return the places that have no neighbour, which a line alone would not show. */
function alone(plot, index) {
  const values = plot.data[index];
  const places = [];
  for (let place = 0; place < values.length; place++) {
    const known = values[place] !== null;
    if (known && (values[place - 1] ?? null) === null && (values[place + 1] ?? null) === null) {
      places.push(place);
    }
  }
  return places;
}
