// Throttle reasons under the clock: a lane for each reason, in it a stripe for each GPU. However
// short a reason was active, its step is coloured; how strongly says for what share of the step.

import { h, show } from "./dom.js";
import { columnParts, reason } from "./format.js";

const FAINTEST = 0.45;

/** Draw the lanes of the series `rows` into `element`; `edges` are the plot's, in pixels. */
export function drawLanes(element, rows, grid, look, [left, width]) {
  const lanes = new Map();
  for (const row of rows) {
    const name = columnParts(row.name).label;
    lanes.set(name, [...(lanes.get(name) ?? []), row]);
  }
  const active = [...lanes]
    .filter(([, stripes]) => stripes.some((row) => row.max.some((value) => value > 0)))
    .sort(([a], [b]) => Number(reason(a).harmless) - Number(reason(b).harmless) || (a < b ? -1 : 1));
  show(
    element,
    active.map(([name, stripes]) =>
      h(
        "div",
        { class: reason(name).harmless ? "lane harmless" : "lane", "data-reason": name, title: name },
        h("span", { class: "name", style: { "margin-left": `${left}px` } }, reason(name).text, ` ${share(stripes)}`),
        h("canvas", { role: "img", "aria-label": `${name}: ${share(stripes)} of the time shown` }),
      ),
    ),
    active.length ? null : h("p", { class: "none", style: { "margin-left": `${left}px` } }, "No throttle reason in this time."),
  );
  [...element.querySelectorAll("canvas")].forEach((canvas, place) => {
    const stripes = active[place][1].sort((a, b) => look.order(a.entity) - look.order(b.entity));
    drawStripes(canvas, stripes, grid, look, [left, width]);
  });
}

/** Return for what share of the known time of these GPUs a reason was active, in words. */
function share(stripes) {
  const known = stripes.flatMap((row) => row.mean).filter((value) => value !== null);
  const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
  return mean < 0.001 ? "< 0.1 %" : `${(mean * 100).toFixed(mean < 0.1 ? 1 : 0)} %`;
}

function drawStripes(canvas, stripes, grid, look, [left, width]) {
  const ratio = window.devicePixelRatio;
  const height = stripes.length > 8 ? 3 : stripes.length > 2 ? 4 : 8;
  canvas.style.height = `${stripes.length * (height + 1)}px`;
  canvas.width = width * ratio;
  canvas.height = stripes.length * (height + 1) * ratio;
  const ctx = canvas.getContext("2d");
  const span = look.end - look.start;
  const x = (step) => left + ((step * grid.step - look.start) / span) * (width - left - 8);
  ctx.scale(ratio, ratio);
  ctx.beginPath();
  ctx.rect(left, 0, width - left - 8, canvas.height);
  ctx.clip();
  stripes.forEach((row, number) => {
    const color = look.colour(row.entity).color;
    row.mean.forEach((value, place) => {
      if (value === null) return;
      const active = row.max[place] > 0;
      ctx.globalAlpha = active ? FAINTEST + (1 - FAINTEST) * value : 1;
      ctx.fillStyle = active ? color : look.css("--track");
      const from = x(grid.first + place);
      ctx.fillRect(from, number * (height + 1), Math.max(x(grid.first + place + 1) - from, 1), height);
    });
  });
}
