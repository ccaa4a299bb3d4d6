// A recording in place of the present: a slider that says which moment of it the page shows.

import { h, show, byId } from "./dom.js";
import { clock, duration, utc } from "./format.js";
import { get } from "./api.js";
import { timeOf, wall } from "./status.js";

const TICK = 0.25; // seconds: what statuses are judged by
const PLAY_MS = 1000;
const BUSY = 503;
const AGAIN_MS = 200;

export class Replay {
  /** `recording` has name, start, end; `onStatus` gets the status of each moment chosen. */
  constructor(recording, onStatus, onFault) {
    this.recording = recording;
    this.onStatus = onStatus;
    this.onFault = onFault;
    this.time = recording.end;
    this.wanted = null;
    this.asking = false;
    this.timer = null;
    this.slider = byId("slider");
    // Whole ticks from the start: a slider counts from its minimum.
    this.slider.max = String(Math.max(1, Math.floor((recording.end - recording.start) / TICK)));
    this.slider.value = this.slider.max;
    this.slider.addEventListener("input", () =>
      this.go(recording.start + this.slider.value * TICK),
    );
    byId("play").addEventListener("click", () => this.play());
    byId("replay").hidden = false;
    show(byId("recording-name"), recording.name);
    this.mark();
  }

  /** Show the moment `seconds`; only the newest wish counts while one is asked for. */
  async go(seconds) {
    const { start, end } = this.recording;
    this.time = this.wanted = Math.min(Math.max(seconds, start), end);
    this.slider.value = String(Math.round((this.time - start) / TICK));
    this.mark();
    if (this.asking) return;
    this.asking = true;
    while (this.wanted !== null) {
      const time = this.wanted;
      this.wanted = null;
      try {
        const status = await get("/api/v1/status", [
          ["recording", this.recording.name],
          ["time", time.toFixed(3)],
        ]);
        this.onStatus(status);
        this.onFault("");
      } catch (fault) {
        this.onFault(fault.message);
        if (fault.status === BUSY) {
          // A long recording is judged by and by.
          this.wanted ??= time;
          await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
        }
      }
    }
    this.asking = false;
  }

  /** Run through the recording in real time, or stop. */
  play() {
    if (this.timer) clearInterval(this.timer);
    else {
      if (this.time >= this.recording.end) this.go(this.recording.start);
      this.timer = setInterval(() => {
        if (this.time >= this.recording.end) this.play();
        else if (!document.hidden) this.go(this.time + PLAY_MS / 1000);
      }, PLAY_MS);
      show(byId("play"), "Stop");
      return;
    }
    this.timer = null;
    show(byId("play"), "Play");
  }

  mark() {
    const { start, end } = this.recording;
    const text = `${clock(this.time, TICK)}, ${duration(this.time - start)} of ${duration(end - start)}`;
    show(byId("slider-time"), h("span", { title: utc(this.time) }, text));
    this.slider.setAttribute("aria-valuetext", text);
  }

  /** Return when what the recording is called by began, as told at its end; null if that is not told. */
  trigger(status) {
    const [, rule] = /^\w+Z-(\w+)/.exec(this.recording.name) ?? [];
    const times = status.alerts
      .filter((alert) => alert.rule === rule)
      .map((alert) => wall(status, alert.since_ns))
      .concat(
        status.events
          .filter((event) => event.name === `${rule}_detected` || event.name === rule)
          .map((event) => wall(status, event.time_ns)),
      )
      .filter((seconds) => seconds >= this.recording.start);
    return times.length ? Math.min(...times) : null;
  }

  /** Show under the slider when alerts began, as told at the end of the recording. */
  showMarks(status) {
    const { start, end } = this.recording;
    const share = (seconds) => ((seconds - start) / (end - start)) * 100;
    const at = status.alerts
      .map((alert) => [
        Math.max(wall(status, alert.since_ns), start),
        alert.severity,
        `${alert.rule} ${alert.state}`,
      ])
      .concat(
        status.events
          .filter((event) => event.name.endsWith("_detected") || event.name === "xid")
          .map((event) => [wall(status, event.time_ns), "info", event.name]),
      )
      .filter(([seconds]) => seconds >= start && seconds <= Math.min(end, timeOf(status) + 1));
    show(
      byId("slider-marks"),
      at.map(([seconds, kind, text]) =>
        h("button", {
          type: "button",
          class: `mark ${kind}`,
          "data-time": String(seconds),
          title: `${text} at ${clock(seconds, TICK)}`,
          "aria-label": `Go to ${text} at ${clock(seconds, TICK)}`,
          style: { left: `${share(seconds).toFixed(2)}%` },
        }),
      ),
    );
  }
}
