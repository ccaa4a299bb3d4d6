// Throttle reasons under the clock: a lane for each reason, in it a stripe for each GPU that it
// struck. However short a reason was active, its step is coloured; how strongly says for what share of the step.

import { h, show } from "./dom.js";
import { columnParts, entityName, reason } from "./format.js";

const FAINTEST = 0.45;
const FEW = 4; // GPUs that are named one by one

/** Draw the lanes of the series `rows` into `element`; `edges` are the plot's, in pixels. */
export function drawLanes(element, rows, grid, look, [left, width]) {
  const lanes = new Map();
  for (const row of rows) {
    const name = columnParts(row.name).label;
    lanes.set(name, [...(lanes.get(name) ?? []), row]);
  }
  const active = [...lanes]
    .map(([name, stripes]) => [
      name,
      stripes,
      stripes.filter((row) => row.max.some((value) => value > 0)),
    ])
    .filter(([, , struck]) => struck.length)
    .sort(
      ([a], [b]) => Number(reason(a).harmless) - Number(reason(b).harmless) || (a < b ? -1 : 1),
    );
  const indent = { "margin-left": `${left}px` };
  show(
    element,
    active.map(([name, , struck]) => {
      const { text, harmless } = reason(name);
      return h(
        "div",
        { class: harmless ? "lane harmless" : "lane", "data-reason": name, title: name },
        h("span", { class: "name", style: indent }, `${text}: ${told(struck)}`),
        h("canvas", { role: "img", "aria-label": `${text}: ${told(struck)} of the time shown` }),
      );
    }),
    active.length || !rows.some((row) => row.mean.some((value) => value !== null))
      ? null
      : h("p", { class: "none", style: indent }, "No throttle reason in this time."),
  );
  [...element.querySelectorAll("canvas")].forEach((canvas, place) => {
    const stripes = active[place][2].sort((a, b) => look.order(a.entity) - look.order(b.entity));
    drawStripes(canvas, stripes, grid, look, [left, width]);
  });
}

/** Return which GPUs a reason struck, and for what share of the known time. */
function told(struck) {
  if (struck.length > FEW) {
    const most = Math.max(...struck.map(share));
    return `${struck.length} GPUs, up to ${percent(most)}`;
  }
  return struck.map((row) => `${entityName(row.entity)} ${percent(share(row))}`).join(", ");
}

function share({ mean }) {
  const known = mean.filter((value) => value !== null);
  return known.reduce((sum, value) => sum + value, 0) / known.length;
}

function percent(value) {
  return value < 0.001 ? "< 0.1 %" : `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`;
}

function drawStripes(canvas, stripes, grid, look, [left, width]) {
  const ratio = window.devicePixelRatio;
  const height = stripes.length > 8 ? 3 : stripes.length > 2 ? 4 : 8;
  canvas.style.height = `${stripes.length * (height + 1)}px`;
  canvas.width = width * ratio;
  canvas.height = stripes.length * (height + 1) * ratio;
  const ctx = canvas.getContext("2d");
  const span = look.end - look.start;
  // Whole pixels of the screen, or the edges of neighbours would shine through.
  const x = (step) => {
    const exact = left + ((step * grid.step - look.start) / span) * (width - left - 8);
    return Math.round(exact * ratio) / ratio;
  };
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
      ctx.fillRect(
        from,
        number * (height + 1),
        Math.max(x(grid.first + place + 1) - from, 1),
        height,
      );
    });
  });
}
