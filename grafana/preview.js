"use strict";
// Draws what preview.py has asked for. Each kind of panel is one function; a kind that is missing
// here says so in its place.

const CLASSIC = ["#7eb26d", "#eab839", "#6ed0e0", "#ef843c", "#e24d42", "#1f78c1", "#ba43a9",
  "#705da0", "#508642", "#cca300", "#447ebc", "#c15c17", "#890f02", "#0a437c", "#6d1f62"];
const COLORS = {
  "green": "#73bf69", "semi-dark-green": "#56a64b", "dark-red": "#c4162a", "red": "#f2495c",
  "orange": "#ff9830", "dark-orange": "#fa6400", "yellow": "#fade2a", "dark-yellow": "#e0b400",
  "semi-dark-yellow": "#f2cc0c", "dark-blue": "#1f60c4", "blue": "#5794f2",
  "light-blue": "#8ab8ff", "super-light-blue": "#c0d8ff",
  "purple": "#b877d9", "dark-purple": "#8f3bb8", "text": "#ccccdc",
};
const SCALES = {
  hertz: [["Hz", 1], ["kHz", 1e3], ["MHz", 1e6], ["GHz", 1e9]],
  watt: [["W", 1], ["kW", 1e3], ["MW", 1e6]],
  s: [["ns", 1e-9], ["µs", 1e-6], ["ms", 1e-3], ["s", 1], ["min", 60], ["h", 3600], ["d", 86400]],
  bytes: [["B", 1], ["KiB", 1024], ["MiB", 1024 ** 2], ["GiB", 1024 ** 3]],
  Bps: [["B/s", 1], ["kB/s", 1e3], ["MB/s", 1e6], ["GB/s", 1e9], ["TB/s", 1e12]],
};

const color = (name) => COLORS[name] || name;
// Black or white, whichever can be read on the colour.
function readable(name) {
  const [red, green, blue] = [1, 3, 5].map((place) => parseInt(name.slice(place, place + 2), 16));
  return red * 0.3 + green * 0.59 + blue * 0.11 > 140 ? "#111217" : "#ffffff";
}
const digits = (value) => +value.toPrecision(3);

function format(value, unit, decimals) {
  if (value === null || value === undefined || Number.isNaN(value)) return "";
  const fixed = (one) => (decimals === undefined ? String(digits(one)) : one.toFixed(decimals));
  if (unit === "percentunit") return `${fixed(value * 100)}%`;
  if (unit === "celsius") return `${fixed(value)} °C`;
  if (unit === "cps") return `${fixed(value)} c/s`;
  const scale = SCALES[unit];
  if (!scale) return fixed(value);
  const size = Math.abs(value);
  const [name, factor] = size === 0 ? scale.find((one) => one[1] === 1)
    : scale.filter((one) => one[1] <= size * 1.0001).pop() || scale[0];
  return `${fixed(value / factor)} ${name}`;
}

function element(parent, tag, text = "", properties = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  Object.assign(made, properties);
  parent.append(made);
  return made;
}

const legend = (format_, labels) => format_.replace(/{{(\w+)}}/g, (_, name) => labels[name] || "")
  .replace(/ +/g, " ").trim();

// All properties of one field: the defaults, then the overrides that match its name.
function properties(panel, name) {
  const defaults = panel.fieldConfig.defaults;
  const all = { ...defaults };
  for (const [key, value] of Object.entries(defaults.custom || {})) all[`custom.${key}`] = value;
  for (const { matcher, properties: changed } of panel.fieldConfig.overrides) {
    if (matcher.options === name) for (const one of changed) all[one.id] = one.value;
  }
  return all;
}

function stepColor(thresholds, value) {
  const passed = thresholds.steps.filter((step) => step.value === null || value >= step.value);
  return color(passed.pop().color);
}

// The text and colour of a value, by mappings and thresholds.
function shown(field, value) {
  const mapping = (field.mappings || [])[0];
  const mapped = mapping && mapping.options[String(value)];
  if (mapped) return [mapped.text, color(mapped.color)];
  return [format(value, field.unit, field.decimals), stepColor(field.thresholds, value)];
}

function series(panel) {
  const all = [];
  for (const target of panel.targets) {
    for (const { metric, values, value } of target.result) {
      const name = legend(target.legendFormat, metric);
      all.push({ name, labels: metric, points: new Map((values || [value]).map(
        ([time, text]) => [Math.round(time), Number(text)])) });
    }
  }
  return all;
}

function times() {
  const all = [];
  for (let time = DATA.start; time <= DATA.end; time += DATA.step) all.push(Math.round(time));
  return all;
}

// Cumulative buckets as rows from the lowest bound up, each with its own part.
function buckets(panel) {
  const rows = series(panel).map((one) => [Number(one.labels.le.replace("+Inf", "Infinity")), one]);
  rows.sort((one, other) => one[0] - other[0]);
  return rows.map(([bound, { points }], index) => {
    const below = index ? rows[index - 1][1].points : new Map();
    const own = new Map([...points].map(([time, value]) => [time, Math.max(0,
      value - (below.get(time) || 0))]));
    return { bound, name: rows[index][1].name, points: own };
  });
}

function nothing(body, panel) {
  element(body, "div", panel.fieldConfig.defaults.noValue || "No data", { className: "nothing" });
}

function canvas(body, below = 0) {
  const plot = element(body, "div", "", { className: "plot" });
  const made = element(plot, "canvas");
  const [width, height] = [plot.clientWidth, plot.clientHeight - below];
  Object.assign(made, { width, height });
  const pen = made.getContext("2d");
  pen.font = "11px Helvetica, Arial, sans-serif";
  return { pen, width, height };
}

function timeAxis(pen, left, width, height) {
  pen.fillStyle = "#9a9aa8";
  pen.textAlign = "center";
  const whole = DATA.end - DATA.start;
  const every = [60, 300, 600, 1800, 3600, 21600, 86400].find((one) => whole / one <= 6) || whole;
  for (let time = Math.ceil(DATA.start / every) * every; time < DATA.end; time += every) {
    const text = new Date(time * 1000).toTimeString().slice(0, 5);
    pen.fillText(text, left + (width - left) * (time - DATA.start) / whole, height - 3);
  }
}

const draw = {
  timeseries(body, panel) {
    const axis = times();
    const all = series(panel);
    if (!all.length) return nothing(body, panel);
    const options = panel.options.legend;
    const fields = all.map((one, index) => {
      const field = properties(panel, one.name);
      const stroke = field.color.fixedColor ? color(field.color.fixedColor)
        : CLASSIC[index % CLASSIC.length];
      const values = axis.map((time) => {
        const value = one.points.get(time);
        return value === undefined || Number.isNaN(value) ? null : value;
      });
      const known = values.filter((value) => value !== null);
      return { ...one, field, stroke, values, known };
    });
    const plot = element(body, "div", "", { className: "plot" });
    const box = element(body, "div", "", { className: `legend ${options.displayMode}` });
    drawLegend(box, fields, options, panel.fieldConfig.defaults);
    const unit = panel.fieldConfig.defaults.unit;
    const place = new Map(fields.map((one, index) => [one.name, index + 1]));
    const bands = fields.filter((one) => one.field["custom.fillBelowTo"]).map((one) => ({
      series: [place.get(one.name), place.get(one.field["custom.fillBelowTo"])],
      fill: `${one.stroke}44`,
    })).filter((one) => one.series[1]);
    const { min, max } = panel.fieldConfig.defaults;
    const { axisSoftMin: soft = Infinity, axisSoftMax: softest = -Infinity } =
      panel.fieldConfig.defaults.custom;
    const steps = panel.fieldConfig.defaults.thresholds.steps.slice(1);
    const line = { stroke: "#9a9aa8", grid: { stroke: "#26282e", width: 1 }, ticks: { show: false } };
    new uPlot({
      width: plot.clientWidth,
      height: plot.clientHeight,
      legend: { show: false },
      cursor: { show: false },
      bands,
      scales: {
        x: { range: () => [DATA.start, DATA.end] },
        y: { range: (_, low, high) => {
          const [least, most] = [min ?? Math.min(low, soft), max ?? Math.max(high, softest, (min ?? high - 1) + 1e-9)];
          const room = (most - least || Math.abs(most) || 1) * 0.06;
          return [min ?? least - room, max ?? most + room];
        } },
      },
      axes: [
        { ...line, size: 24, values: (_, ticks) => ticks.map(
          (tick) => new Date(tick * 1000).toTimeString().slice(0, 5)), space: 60 },
        { ...line, size: 62, incrs: unit === "bytes" ? [...Array(40).keys()].map((power) => 2 ** power)
          : undefined, values: (_, ticks) => ticks.map((tick) => format(tick, unit)) },
      ],
      series: [{}, ...fields.map((one) => ({
        stroke: one.stroke,
        width: one.field["custom.lineWidth"],
        dash: (one.field["custom.lineStyle"] || {}).dash,
        fill: one.field["custom.fillOpacity"] && !one.field["custom.fillBelowTo"]
          ? `${one.stroke}${Math.round(one.field["custom.fillOpacity"] * 2.55).toString(16)
            .padStart(2, "0")}` : undefined,
        points: { show: false },
        spanGaps: false,
      }))],
      hooks: { draw: [(chart) => decorate(chart, steps)] },
    }, [axis, ...fields.map((one) => one.values)], plot);
  },

  stat(body, panel) {
    const all = series(panel);
    if (!all.length) return nothing(body, panel);
    const value = [...all[0].points.values()].pop();
    const [text, tint] = shown(panel.fieldConfig.defaults, value);
    const box = element(body, "div", panel.options.textMode === "name" ? all[0].name : text,
      { className: "stat" });
    if (panel.options.textMode === "name") box.style.fontSize = "17px";
    if (panel.options.colorMode === "background") {
      Object.assign(box.style, { background: tint, color: readable(tint) });
    }
  },

  table(body, panel) {
    const organize = panel.transformations.find((one) => one.id === "organize").options;
    const many = panel.targets.length > 1;
    const rows = new Map();
    for (const { refId, result } of panel.targets) {
      for (const { metric, value } of result) {
        const { __name__, ...labels } = metric;
        const key = JSON.stringify(Object.entries(labels).sort());
        if (!rows.has(key)) rows.set(key, { ...labels });
        rows.get(key)[many ? `Value #${refId}` : "Value"] = Number(value[1]);
      }
    }
    if (!rows.size) return nothing(body, panel);
    const names = Object.keys(organize.indexByName).filter((one) => !organize.excludeByName[one]);
    names.sort((one, other) => organize.indexByName[one] - organize.indexByName[other]);
    const found = [...rows.values()];
    for (const { displayName, desc } of [...panel.options.sortBy].reverse()) {
      const name = names.find((one) => organize.renameByName[one] === displayName);
      found.sort((one, other) => {
        const [a, b] = [one[name], other[name]];
        if (a === b) return 0;
        if (a === undefined || b === undefined) return a === undefined ? 1 : -1;
        return (a < b ? -1 : 1) * (desc ? -1 : 1);
      });
    }
    const made = element(body, "table", "", { className: "cells" });
    const header = element(made, "tr");
    for (const name of names) {
      const number = name.startsWith("Value");
      element(header, "th", organize.renameByName[name], { className: number ? "number" : "" });
    }
    for (const row of found) {
      const line = element(made, "tr");
      for (const name of names) {
        const field = properties(panel, organize.renameByName[name]);
        const value = row[name];
        if (typeof value === "number") {
          const [text, tint] = shown(field, value);
          const cell = element(line, "td", text, { className: "number" });
          if ((field["custom.cellOptions"] || {}).type === "color-background") {
            cell.style.background = tint;
            if (tint !== "transparent") cell.style.color = readable(tint);
          }
        } else {
          element(element(line, "td"), field.links ? "a" : "span", value || "");
        }
      }
    }
  },

  "state-timeline"(body, panel) {
    const all = series(panel);
    if (!all.length) return nothing(body, panel);
    const field = panel.fieldConfig.defaults;
    const axis = times();
    const { pen, width, height } = canvas(body, 18); // its legend comes later
    const left = Math.min(width / 3, 12 + Math.max(
      ...all.map((one) => pen.measureText(one.name).width)));
    const band = (height - 16) / all.length;
    const column = (width - left) / axis.length;
    const used = new Map();
    all.forEach((one, index) => {
      pen.fillStyle = "#ccccdc";
      pen.textAlign = "right";
      pen.fillText(one.name, left - 6, band * (index + 0.5) + 4, left - 8);
      axis.forEach((time, place) => {
        if (!one.points.has(time)) return;
        const [text, tint] = shown(field, one.points.get(time));
        used.set(text, tint);
        pen.fillStyle = tint;
        pen.fillRect(left + place * column, band * (index + 0.08), column + 0.5, band * 0.84);
      });
    });
    timeAxis(pen, left, width, height);
    const box = element(body, "div", "", { className: "legend list" });
    for (const [text, tint] of used) {
      const item = element(box, "span");
      element(item, "i").style.background = tint;
      item.append(text);
    }
  },

  heatmap(body, panel) {
    const rows = buckets(panel);
    if (!rows.length) return nothing(body, panel);
    const axis = times();
    const most = Math.max(1e-12, ...rows.flatMap(({ points }) => [...points.values()]));
    const { pen, width, height } = canvas(body);
    const [left, tall] = [62, (height - 16) / rows.length];
    const column = (width - left) / axis.length;
    rows.forEach(({ bound, points }, index) => {
      const top = height - 16 - tall * (index + 1);
      pen.fillStyle = "#9a9aa8";
      pen.textAlign = "right";
      const text = Number.isFinite(bound) ? format(bound, panel.options.yAxis.unit) : "more";
      if (tall > 10 || index % 2) pen.fillText(text, left - 6, top + tall / 2 + 4);
      axis.forEach((time, place) => {
        const value = points.get(time) || 0;
        if (value <= panel.options.filterValues.le) return;
        pen.fillStyle = `rgba(250, 100, 0, ${0.08 + 0.92 * Math.sqrt(value / most)})`;
        pen.fillRect(left + place * column, top + 0.5, Math.max(1, column - 0.5), tall - 1);
      });
    });
    timeAxis(pen, left, width, height);
  },

  bargauge(body, panel) {
    const field = panel.fieldConfig.defaults;
    const cumulative = panel.targets[0].format === "heatmap";
    const bars = (cumulative ? buckets(panel) : series(panel)).map((one) => [
      properties(panel, one.name).displayName || one.name, [...one.points.values()].pop()]);
    if (!bars.length) return nothing(body, panel);
    const most = field.max ?? Math.max(...bars.map((one) => one[1]));
    for (const [name, value] of bars) {
      const line = element(body, "div", "", { className: "bar" });
      element(line, "label", name);
      const bar = element(element(line, "div"), "i");
      bar.style.width = `${100 * value / most}%`;
      bar.style.background = field.color.fixedColor ? color(field.color.fixedColor)
        : stepColor(field.thresholds, value);
      element(line, "b", format(value, field.unit, field.decimals));
    }
  },
};

function drawLegend(box, fields, options, defaults) {
  const mean = (all) => all.reduce((sum, value) => sum + value, 0) / all.length;
  const calculations = { mean, max: (all) => Math.max(...all), lastNotNull: (all) => all.at(-1) };
  const titles = { mean: "Mean", max: "Max", lastNotNull: "Last" };
  if (options.displayMode === "list") {
    for (const { name, stroke } of fields) {
      const item = element(box, "span");
      element(item, "i").style.background = stroke;
      item.append(name);
    }
    return;
  }
  const table = element(box, "table");
  const header = element(table, "tr");
  for (const text of ["", ...options.calcs.map((one) => titles[one])]) {
    element(header, "td", text, { className: text ? "number" : "" });
  }
  const ordered = [...fields].sort((one, other) => Math.max(...other.known) - Math.max(...one.known));
  for (const { name, stroke, known } of ordered) {
    const line = element(table, "tr");
    const cell = element(line, "td");
    element(cell, "i").style.background = stroke;
    cell.append(name);
    for (const one of options.calcs) {
      const text = known.length ? format(calculations[one](known), defaults.unit) : "";
      element(line, "td", text, { className: "number" });
    }
  }
}

// Thresholds as dashed lines, and where an alert began to fire.
function decorate(chart, steps) {
  const { ctx, bbox } = chart;
  ctx.save();
  ctx.setLineDash([6, 6]);
  for (const { value, color: name } of steps) {
    const y = chart.valToPos(value, "y", true);
    if (y < bbox.top || y > bbox.top + bbox.height) continue;
    ctx.strokeStyle = color(name);
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
  }
  ctx.setLineDash([3, 3]);
  for (const { color: name, result } of DATA.marks) {
    for (const { values } of result) {
      let before = -Infinity;
      for (const [time] of values) {
        if (time - before > DATA.step * 1.5 && time > DATA.start + DATA.step) {
          const x = chart.valToPos(time, "x", true);
          ctx.strokeStyle = color(name);
          ctx.beginPath();
          ctx.moveTo(x, bbox.top);
          ctx.lineTo(x, bbox.top + bbox.height);
          ctx.stroke();
        }
        before = time;
      }
    }
  }
  ctx.restore();
}

for (const [name, value] of Object.entries(DATA.variables)) {
  element(document.getElementById("variables"), "span", `${name}: ${value}`);
}
for (const panel of DATA.panels) {
  const { x, y, w, h } = panel.gridPos;
  const section = element(document.querySelector("main"), "section");
  section.style.gridArea = `${y + 1} / ${x + 1} / span ${h} / span ${w}`;
  if (panel.type === "row") {
    section.className = "row";
    section.append(panel.title);
    continue;
  }
  element(section, "h2", panel.title, { title: panel.description });
  const body = element(section, "div", "", { className: "body" });
  if (draw[panel.type]) draw[panel.type](body, panel);
  else element(body, "div", `not drawn here: ${panel.type}`, { className: "nothing" });
}
