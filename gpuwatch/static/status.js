// The top of the page: what should become of this node, why, and what to do.

import { h, show, byId } from "./dom.js";
import { clock, duration, entityName, figure, moment, utc } from "./format.js";

const SEVERITIES = ["critical", "warning", "info"];
const DETECTED_SECONDS = 60;
const VERDICTS = {
  ok: "nothing to do",
  watch: "keep an eye on it",
  drain: "take no new jobs",
  reset: "drain, then reset the GPU",
  reboot: "drain, then reboot",
};

/** Return the node's time of a status, in seconds since 1970. */
export function timeOf(status) {
  return status.realtime_ns / 1e9;
}

/** Return when something was, by its time on the node's own clock. */
export function wall(status, ns) {
  return (status.realtime_ns + (ns - status.time_ns)) / 1e9;
}

/** Return a <time> in local time, with UTC as its title. */
export function when(seconds, now, step = 1) {
  return h(
    "time",
    { datetime: new Date(seconds * 1000).toISOString(), title: utc(seconds) },
    moment(seconds, now, step),
  );
}

/** Show host, version, verdict and whose data this is. */
export function showHeader(status, recording) {
  const verdict = status.verdict ?? "unknown";
  byId("verdict").className = `verdict ${verdict}`;
  show(
    byId("verdict"),
    h("span", { class: "word" }, verdict),
    h("span", { class: "meaning" }, VERDICTS[verdict] ?? "no samples were judged yet"),
  );
  show(byId("host"), status.hostname ?? (recording ? "Recording" : "GPU node"));
  show(byId("version"), `gpuwatch ${status.version}`);
  show(byId("time"), when(timeOf(status), timeOf(status)));
  const firing = status.alerts.filter((alert) => alert.state === "firing").length;
  const mark = recording ? "recording, " : "";
  document.title = `${firing ? `(${firing}) ` : ""}${mark}${verdict} · ${status.hostname ?? "gpuwatch"}`;
  const { kind, scenario, file } = status.source ?? {};
  const foreign = kind && kind !== "nvml" && !recording;
  const released = ["gpus", "counters"].filter((what) => status.released?.[what]);
  byId("notice").hidden = !foreign && !released.length;
  show(
    byId("notice"),
    foreign
      ? h(
          "p",
          {},
          h("strong", {}, "Not this node's data: "),
          [kind, scenario, file].filter(Boolean).join(" "),
        )
      : null,
    released.map((what) =>
      h(
        "p",
        {},
        h("strong", {}, `Released: ${what === "gpus" ? "GPUs" : what}, `),
        "left to another tool until ",
        h("code", {}, `gpuwatch resume ${what}`),
      ),
    ),
  );
  const faults = [status.state?.fault, status.state?.history_fault].filter(Boolean);
  byId("fault").hidden = !faults.length;
  show(
    byId("fault"),
    faults.map((fault) => h("p", {}, fault)),
  );
}

/** Show alerts: firing ones, worst first, then what is pending, then what was only seen. */
export function showAlerts(status, recording) {
  const worst = (alert) => SEVERITIES.indexOf(alert.severity);
  const of = (state) =>
    status.alerts
      .filter((alert) => alert.state === state)
      .sort((a, b) => worst(a) - worst(b) || a.since_ns - b.since_ns);
  const [firing, pending] = [of("firing"), of("pending")];
  const seen = detected(status);
  const card = (alert) => alertCard(alert, status, recording);
  show(
    byId("firing"),
    firing.length
      ? firing.map(card)
      : h(
          "p",
          { class: "quiet" },
          status.ready === false ? "No samples yet." : "No alert is firing.",
        ),
  );
  byId("pending").hidden = !pending.length && !seen.length;
  show(
    byId("pending"),
    h("h3", {}, "Not firing yet"),
    pending.map(card),
    seen.map((event) =>
      h(
        "p",
        { class: "seen" },
        h("strong", {}, "detected "),
        h("code", {}, event.name.replace(/_detected$/, "")),
        ` on ${entityName(event.entity)} at `,
        when(wall(status, event.time_ns), timeOf(status)),
        event.detail ? ` (${event.detail})` : "",
      ),
    ),
  );
  announce(firing);
}

/** Return what rules saw within the last minute that is neither pending nor firing. */
function detected(status) {
  const now = timeOf(status);
  const open = new Set(status.alerts.map((alert) => `${alert.rule} ${alert.entity}`));
  const newest = new Map();
  for (const event of status.events) {
    if (!event.name.endsWith("_detected")) continue;
    const key = `${event.name.slice(0, -"_detected".length)} ${event.entity}`;
    if (!open.has(key) && now - wall(status, event.time_ns) <= DETECTED_SECONDS)
      newest.set(key, event);
  }
  return [...newest.values()];
}

function alertCard(alert, status, recording) {
  const since = wall(status, alert.since_ns);
  const now = timeOf(status);
  const firing = alert.state === "firing";
  return h(
    "article",
    {
      class: `alert ${alert.severity} ${alert.state}`,
      "data-rule": alert.rule,
      "data-entity": alert.entity.join("/"),
    },
    h(
      "header",
      {},
      h("strong", { class: "badge" }, firing ? alert.severity : `${alert.severity}, pending`),
      h("h3", {}, alert.rule),
      h("span", { class: "place" }, entityName(alert.entity), alert.place ? ` ${alert.place}` : ""),
      h(
        "span",
        { class: "since" },
        "since ",
        when(since, now),
        ` (${duration(Math.max(0, now - since))})`,
      ),
    ),
    h("p", { class: "next" }, prose(alert.next_step)),
    h(
      "p",
      { class: "facts" },
      h("span", {}, "value ", h("b", {}, figure(alert.value)), ", limit ", figure(alert.limit)),
      alert.verdict && alert.verdict !== "ok"
        ? h("span", {}, "asks for ", h("b", {}, alert.verdict))
        : null,
      alert.detail ? h("span", {}, alert.detail) : null,
    ),
    firing ? causes(alert.causes) : null,
    h(
      "p",
      { class: "links" },
      alert.recording && alert.recording !== recording?.name
        ? h(
            "a",
            { href: `/?recording=${encodeURIComponent(alert.recording)}` },
            "Open its recording",
          )
        : null,
      h("a", { href: `/runbooks/${alert.rule}.md` }, "Runbook"),
      alert.entity[0] === "gpu"
        ? h(
            "button",
            { type: "button", "data-only": alert.entity[1] },
            `Show GPU ${alert.entity[1]} alone`,
          )
        : null,
    ),
  );
}

/** Return text in which `commands` stand in backquotes. */
function prose(text) {
  return text.split("`").map((part, place) => (place % 2 ? h("code", {}, part) : part));
}

/** Return why a GPU is slow, most likely cause first, null if nothing is said. */
export function causes(found) {
  if (!found?.length) return null;
  return h(
    "ol",
    { class: "causes", "aria-label": "Why" },
    found.map(({ cause, share, text }) =>
      h(
        "li",
        { title: cause },
        typeof share === "number" ? h("b", {}, `${Math.round(share * 100)} % `) : null,
        text || cause.replaceAll("_", " "),
      ),
    ),
  );
}

let announced = "";

/** Tell who listens rather than looks which alerts fire, when that changes. */
function announce(firing) {
  const text = firing
    .map((alert) => `${alert.severity}: ${alert.rule} on ${entityName(alert.entity)}`)
    .join(". ");
  if (text === announced) return;
  announced = text;
  byId("announcer").textContent = text || "No alert is firing.";
}

/** Show that the node is not heard, since `seconds`; null when it is again. */
export function showConnection(seconds) {
  document.body.classList.toggle("stale", seconds !== null);
  byId("connection").hidden = seconds === null;
  if (seconds !== null) {
    show(byId("connection"), "No connection since ", clock(seconds), ": the values are old.");
  }
}
