// The stretch of time that all charts show, and the grid of steps that it is asked for in.

// A column of pixels is one step or more; 1 ms is the finest that anything is sampled at.
const STEPS = [
  0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600,
  1800, 3600,
];
const MOST_POINTS = 1900;
const SHORTEST = 0.01; // seconds: ten of the finest steps
const LONGEST = 32 * 86400;

export class Timeline {
  constructor(span = 60) {
    this.span = span;
    this.usual = span; // what is shown on going live
    this.end = null; // seconds since 1970; null until something is known
    this.live = true; // the end moves with time
    this.bounds = null; // [start, end] of a recording, which has no other time
    this.earlier = []; // what was shown before each zoom
  }

  get start() {
    return this.end - this.span;
  }

  /** Take in what time it is on the node. */
  follow(now) {
    if (this.live && !this.bounds) this.end = now;
    else if (this.end === null) this.end = now;
  }

  /** Show a recording as a whole, and nothing beside it. */
  confine(start, end) {
    this.bounds = [start, end];
    this.live = false;
    this.whole();
  }

  /** Show the recording as a whole, or the newest `span` seconds. */
  whole(span = this.usual) {
    this.earlier = [];
    if (this.bounds) {
      this.span = Math.max(this.bounds[1] - this.bounds[0], SHORTEST);
      this.end = this.bounds[1];
    } else {
      this.span = this.usual = span;
      this.live = true;
    }
  }

  /** Whether all of a recording is shown. */
  get shownWhole() {
    return Boolean(this.bounds) && this.span >= this.bounds[1] - this.bounds[0];
  }

  /** Show exactly this stretch; `back` returns from it. */
  zoomTo(start, end) {
    this.earlier.push({ span: this.span, end: this.end, live: this.live });
    this.live = false;
    this._set(start, end);
  }

  /** Show a longer (above 1) or shorter stretch around the middle, or up to now if that is shown. */
  zoomBy(factor) {
    const middle = this.end - this.span / 2;
    const span = this.span * factor;
    if (this.live) this.span = this.usual = limited(span);
    else this._set(middle - span / 2, middle + span / 2);
  }

  /** Move by a share of what is shown; beyond now it follows the time again. */
  pan(share, now) {
    const by = this.span * share;
    this.live = !this.bounds && this.end + by >= now;
    this._set(this.start + by, this.end + by);
    if (this.live) this.end = now;
  }

  pause() {
    this.live = false;
  }

  /** Show what was shown before the last zoom; false if there is nothing. */
  back() {
    const before = this.earlier.pop();
    if (before) Object.assign(this, before);
    return Boolean(before);
  }

  /** Return the grid for charts of so many pixels: whole steps since 1970, first and count. */
  grid(pixels) {
    const points = Math.min(Math.max(pixels, 50), MOST_POINTS);
    const step = STEPS.find((one) => this.span / one <= points) ?? STEPS.at(-1);
    const last = Math.floor(this.end / step + 1e-6);
    const count = Math.min(Math.ceil(this.span / step) + 1, MOST_POINTS + 1);
    return { step, first: last - count + 1, count };
  }

  _set(start, end) {
    const span = limited(end - start);
    const middle = (start + end) / 2;
    this.span = span;
    this.end = middle + span / 2;
    if (!this.bounds) return;
    this.span = Math.min(span, this.bounds[1] - this.bounds[0]);
    this.end = Math.min(Math.max(this.end, this.bounds[0] + this.span), this.bounds[1]);
  }
}

function limited(span) {
  return Math.min(Math.max(span, SHORTEST), LONGEST);
}
