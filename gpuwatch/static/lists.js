// What is below the charts: recordings to open, events to search, sources to trust or not.

import { h, show, byId } from "./dom.js";
import { duration, entityName, quantity, UNKNOWN } from "./format.js";
import { timeOf, wall, when } from "./status.js";

const COST_SECONDS = 30; // CPU time is told over so long, as it is counted in steps of 10 ms

/** Show recordings, newest first. */
export function showRecordings(recordings, now, open) {
  byId("recordings").hidden = !recordings.length;
  show(
    byId("recording-rows"),
    recordings.map((one) =>
      h(
        "tr",
        { class: one.name === open ? "chosen" : "" },
        h(
          "th",
          { scope: "row" },
          h(
            "a",
            { href: `/?recording=${encodeURIComponent(one.name)}`, title: one.name },
            when(one.start, now),
          ),
        ),
        h("td", { "data-title": "Rule" }, one.rule || "on request"),
        h("td", { "data-title": "Where" }, one.entity ? place(one.entity) : UNKNOWN),
        h(
          "td",
          { "data-title": "Length" },
          duration(one.end - one.start),
          one.complete ? "" : " (cut short)",
        ),
        h("td", { "data-title": "Size" }, quantity(one.bytes, "bytes")),
        h(
          "td",
          { "data-title": "File" },
          h(
            "a",
            { href: `/api/v1/recordings/${encodeURIComponent(one.name)}`, download: one.name },
            "download",
          ),
        ),
      ),
    ),
  );
}

function place(entity) {
  return Array.isArray(entity) ? entityName(entity) : String(entity);
}

/** Show events, newest first, those that have all words of `filter`. */
export function showEvents(status, filter) {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const events = status.events.toReversed().filter((event) => {
    const text = `${event.name} ${entityName(event.entity)} ${event.detail}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  show(
    byId("event-rows"),
    events.map((event) =>
      h(
        "tr",
        {},
        h("th", { scope: "row" }, when(wall(status, event.time_ns), timeOf(status), 0.001)),
        h("td", { "data-title": "Event" }, h("code", {}, event.name)),
        h("td", { "data-title": "Where" }, entityName(event.entity)),
        h("td", { "data-title": "Detail", class: "detail" }, event.detail),
      ),
    ),
  );
  const all = status.events.length;
  show(
    byId("event-count"),
    words.length ? `${events.length} of the newest ${all}` : `the newest ${all}`,
  );
}

const costs = []; // {seconds, cpu by duty}, the oldest first

/** Return each duty's share of a core lately, as told by statuses until now. */
function processorShares(status) {
  const now = { seconds: status.time_ns / 1e9, cpu: {} };
  for (const child of status.children ?? []) {
    if (typeof child.cpu_seconds === "number") now.cpu[child.duty] = child.cpu_seconds;
  }
  if (costs.length && now.seconds <= costs.at(-1).seconds) costs.length = 0;
  costs.push(now);
  while (costs.length > 2 && now.seconds - costs[1].seconds >= COST_SECONDS) costs.shift();
  const before = costs[0];
  const passed = now.seconds - before.seconds;
  return (duty) =>
    passed > 1 && duty in now.cpu && duty in before.cpu
      ? (now.cpu[duty] - before.cpu[duty]) / passed
      : null;
}

/** Show where samples come from, how often, and what reading costs. */
export function showSources(status) {
  byId("sources").hidden = !Object.keys(status.sources ?? {}).length;
  show(
    byId("source-rows"),
    Object.entries(status.sources ?? {}).map(([name, told]) => {
      const [slow, planned] = [told.period_achieved_seconds, told.period_seconds];
      const late = slow && planned && slow > 1.5 * planned;
      const errors = Object.entries(told.errors ?? {});
      const working = told.state === "on";
      return h(
        "tr",
        {},
        h("th", { scope: "row" }, name),
        h(
          "td",
          { "data-title": "State" },
          h(
            "span",
            { class: `state ${working ? "ok" : told.state === "off" ? "unknown" : "warning"}` },
            told.state,
          ),
          told.reason ? ` ${told.reason}` : "",
        ),
        h("td", { "data-title": "Every" }, duration(planned)),
        h(
          "td",
          { "data-title": "Achieved" },
          h("span", { class: late ? "near" : "" }, duration(slow)),
        ),
        h("td", { "data-title": "Age" }, duration(told.age_seconds)),
        h(
          "td",
          { "data-title": "Errors" },
          errors.length
            ? errors.map(([error, count]) => h("span", { class: "tag" }, `${error} ${count}`))
            : "none",
        ),
      );
    }),
  );
  const share = processorShares(status);
  show(
    byId("children"),
    (status.children ?? []).map((child) => {
      const cost = share(child.duty);
      const troubles = [
        child.stuck ? "stuck in a call" : "",
        child.restarts ? `restarts: ${child.restarts}` : "",
      ].filter(Boolean);
      return h(
        "li",
        {},
        h("b", {}, child.duty),
        cost === null ? "" : ` ${(cost * 100).toFixed(1)} % of a core`,
        troubles.length ? h("span", { class: "near" }, ` ${troubles.join(", ")}`) : null,
      );
    }),
  );
}
