// The page: what is shown of which time, kept up with the node.

import { get, Stream } from "./api.js";
import { Canaries } from "./canaries.js";
import { chartOf, chartsFor, otherSignals } from "./charts.js";
import { byId, h, show } from "./dom.js";
import { clock, duration, utc } from "./format.js";
import { showGpus, showPorts } from "./gpus.js";
import { listen } from "./keyboard.js";
import { showEvents, showRecordings, showSources } from "./lists.js";
import { Look } from "./look.js";
import { Plot } from "./plot.js";
import { Replay } from "./replay.js";
import { Samples } from "./samples.js";
import { showAlerts, showConnection, showHeader, timeOf } from "./status.js";
import { Timeline } from "./timeline.js";

const RECORDINGS_MS = 15_000;
const COLUMNS_MS = 10_000;
const AGAIN_MS = 2000;

const timeline = new Timeline();
const samples = new Samples();
const look = new Look();
const canaries = new Canaries(look, showFault);
let columns = [];
let plots = [];
let status = null;
let replay = null;
let fetching = false;
let again = false;

const seen = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const plot = plots.find((one) => one.element === entry.target);
      if (plot) plot.seen = entry.isIntersecting;
    }
    refresh();
  },
  { rootMargin: "200px" },
);

const actions = {
  zoomTo: (start, end) => (timeline.zoomTo(start, end), turn()),
  zoomBy: (factor) => (timeline.zoomBy(factor), turn()),
  pan(share) {
    if (replay && timeline.shownWhole) return replay.go(replay.time + Math.sign(share));
    timeline.pan(share, status ? timeOf(status) : 0);
    turn();
  },
  back: () => (timeline.back() || timeline.whole(), turn()),
  span: (seconds) => (timeline.whole(seconds), turn()),
  pause: () => {
    if (replay) replay.play();
    else if (timeline.live) timeline.pause();
    else timeline.whole();
    turn();
  },
  point(seconds, clicked) {
    show(
      byId("cursor"),
      seconds === null ? "" : clock(seconds, Math.min(timeline.grid(pixels()).step, 0.999)),
    );
    byId("cursor").title = seconds === null ? "" : utc(seconds);
    if (clicked && replay) replay.go(seconds);
  },
  pick(gpu, more) {
    const all = status?.gpus.map((one) => one.gpu) ?? [];
    if (all.includes(gpu)) look.pick(gpu, more, all);
    samples.clear();
    showStatus();
    refresh();
  },
  moment: (share) =>
    replay?.go(replay.recording.start + share * (replay.recording.end - replay.recording.start)),
};

/** Take in a status: of now, or of a moment of the recording. */
function onStatus(told) {
  status = told;
  look.learn(status);
  if (!replay) timeline.follow(timeOf(status));
  showStatus();
  refresh();
}

function showStatus() {
  if (!status) return;
  showHeader(status, replay?.recording);
  showAlerts(status, replay?.recording);
  showGpus(status, look);
  showSources(status);
  showEvents(status, byId("filter").value);
  canaries.follow(status, timeOf(status), replay?.recording.name);
}

function pixels() {
  const plot = plots.find((one) => one.canvas.clientWidth);
  return Math.max(50, (plot?.canvas.clientWidth ?? 600) - 72);
}

/** Show another stretch of time: what was asked for the last one is no longer wanted. */
function turn() {
  samples.stop();
  refresh();
}

/** Fetch what the visible charts miss and draw them; one request at a time. */
async function refresh() {
  if (document.hidden || timeline.end === null) return;
  if (fetching) {
    again = true;
    return;
  }
  fetching = true;
  try {
    do {
      again = false;
      await fetchAndDraw();
    } while (again);
  } finally {
    fetching = false;
  }
}

async function fetchAndDraw() {
  const visible = plots.filter((plot) => plot.seen);
  const grid = timeline.grid(pixels());
  const ports = plots.filter((plot) => plot.chart.id === "rdma"); // their table shows rates
  const signals = new Map([...visible, ...ports].flatMap((plot) => plot.signals));
  // Who moves in time sees at once what is known; what comes by itself is drawn once.
  if (!timeline.live || !signals.size) draw(visible, grid);
  else showTimes(grid); // who goes on pressing a key has each fetch given up
  if (!signals.size) return;
  try {
    const entities = look.entities(columns, [...signals.keys()]);
    const fetched = samples.fetch(signals, entities, grid);
    byId("loading").hidden = !samples.loading;
    await fetched;
    draw(visible, grid);
    showFault("");
  } catch (fault) {
    if (fault.name !== "AbortError") showFault(fault.message);
  } finally {
    byId("loading").hidden = true;
  }
}

function draw(visible, grid) {
  look.view(timeline, status, replay);
  for (const plot of visible) plot.draw(samples, grid, look);
  showPorts(status ?? {}, look.portRates(samples, grid), look);
  showTimes(grid);
}

function showTimes({ step }) {
  const { start, end, live, span } = timeline;
  const fine = span < 20 ? 0.001 : 1;
  byId("range").title = `${utc(start)} to ${utc(end)}`;
  show(byId("range"), `${clock(start, fine)} – ${clock(end, fine)}`);
  const finest = Math.min(...plots.map((plot) => plot.chart.finest).filter(Boolean));
  show(
    byId("step"),
    `${duration(span)}, 1 step = ${duration(step)}`,
    Number.isFinite(finest) ? `; samples every ${duration(finest)}` : "",
    samples.sources.size ? `, from ${[...samples.sources].join(" and ")}` : "",
  );
  byId("step").dataset.step = String(step);
  document.body.classList.toggle("paused", !live);
  const pause = byId("pause");
  pause.setAttribute("aria-pressed", String(!live));
  show(pause, live ? "Pause" : "Paused: go live");
  pause.hidden = Boolean(timeline.bounds);
  byId("zoom-out").disabled = !timeline.earlier.length;
  for (const button of document.querySelectorAll("[data-span]")) {
    button.setAttribute("aria-pressed", String(live && Number(button.dataset.span) === span));
  }
}

function showFault(text) {
  byId("chart-fault").hidden = !text;
  show(byId("chart-fault"), text);
}

/** Learn which columns there are and make their charts. */
async function learnColumns() {
  if (document.hidden) return;
  let told;
  try {
    told = await get("/api/v1/columns", [["recording", replay?.recording.name ?? null]]);
  } catch (fault) {
    showFault(fault.message);
    setTimeout(learnColumns, AGAIN_MS);
    return;
  }
  columns = told.columns;
  const wanted = chartsFor(columns);
  const more = plots.filter((plot) => plot.chart.more).map((plot) => plot.chart);
  arrange([...wanted, ...more]);
  const other = otherSignals(columns);
  show(
    byId("more"),
    h("option", { value: "" }, `Another signal (${other.length})…`),
    other.map((name) => h("option", { value: name }, name)),
  );
  byId("more").parentElement.hidden = !other.length;
}

/** Have exactly these charts, in this order; those that are there stay. */
function arrange(charts) {
  const before = new Map(plots.map((plot) => [plot.chart.id, plot]));
  plots = charts.map((chart) => {
    const plot = before.get(chart.id) ?? new Plot(chart, actions);
    plot.chart = chart;
    before.delete(chart.id);
    return plot;
  });
  for (const gone of before.values()) {
    seen.unobserve(gone.element);
    gone.destroy();
  }
  plots.forEach((plot, place) => {
    const there = byId("plots").children[place];
    if (there !== plot.element) byId("plots").insertBefore(plot.element, there ?? null);
    seen.observe(plot.element);
  });
  byId("charts").hidden = !plots.length;
}

async function learnRecordings() {
  if (document.hidden || replay?.recording.alone) return;
  try {
    const { recordings } = await get("/api/v1/recordings");
    showRecordings(recordings, status ? timeOf(status) : 0, replay?.recording.name);
  } catch (fault) {
    showFault(fault.message);
  }
}

/** Show a recording: its columns, its whole time, the moment that it was made for. */
async function openRecording(recording) {
  samples.recording = recording.name;
  timeline.confine(recording.start, recording.end);
  replay = new Replay(recording, onStatus, showFault);
  byId("live").hidden = Boolean(recording.alone);
  byId("spans").hidden = true;
  byId("slider-marks").addEventListener("click", (event) => {
    const { time } = event.target.dataset;
    if (time) replay.go(Number(time));
  });
  await replay.go(recording.end);
  if (!status) return;
  replay.showMarks(status);
  const trigger = replay.trigger(status);
  // States are judged once a second, so that before it is of before.
  if (trigger !== null) await replay.go(trigger + 1);
}

async function begin() {
  const name = new URLSearchParams(location.search).get("recording");
  if (name) {
    const told = await get("/api/v1/columns", [["recording", name]]);
    await openRecording({ name, start: told.start, end: told.end });
  } else {
    const told = await get("/api/v1/status");
    if (told.recording) await openRecording({ ...told.recording, alone: true });
    else {
      onStatus(told);
      new Stream("/api/v1/stream", onStatus, showConnection);
    }
  }
  await learnColumns();
  await learnRecordings();
  setInterval(learnRecordings, RECORDINGS_MS);
  if (!replay) setInterval(learnColumns, COLUMNS_MS);
}

listen(actions);
byId("filter").addEventListener("input", () => status && showEvents(status, byId("filter").value));
byId("more").addEventListener("change", () => {
  const chart = chartOf(byId("more").value, columns);
  byId("more").value = "";
  if (!chart || plots.some((plot) => plot.chart.id === chart.id)) return;
  arrange([...plots.map((plot) => plot.chart), chart]);
  byId(`chart-${chart.id}`).scrollIntoView({ block: "nearest" });
});
new ResizeObserver(() => refresh()).observe(byId("plots"));
document.addEventListener("visibilitychange", () => refresh());
look.onTheme(() => (showStatus(), refresh()));

/** Begin, and again as long as the daemon does not answer. */
async function start() {
  try {
    await begin();
    byId("fault").hidden = true;
  } catch (fault) {
    byId("fault").hidden = false;
    const back = location.search ? h("a", { href: "/" }, "Back to live") : null;
    show(byId("fault"), h("p", {}, fault.message, " ", back));
    if (!(fault.status < 500)) setTimeout(start, AGAIN_MS);
  }
}

start();
