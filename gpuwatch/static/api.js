// The daemon's API: JSON by GET, and the stream of statuses with what it means that it is silent.

// The address of a page that was opened as user:password@host has them, and fetch refuses that.
const { origin } = location;

/** Return the JSON of a GET; throws an Error with the server's own words and `status`. */
export async function get(path, parameters = [], signal = undefined) {
  const query = new URLSearchParams(parameters.filter(([, value]) => value !== null)).toString();
  const answer = await fetch(origin + path + (query && `?${query}`), { signal });
  if (answer.ok) return answer.json();
  const told = await answer.json().catch(() => ({}));
  throw Object.assign(new Error(told.error ?? `${path}: ${answer.status}`), {
    status: answer.status,
  });
}

const SILENT_MS = 5000; // statuses come about once a second
const AGAIN_MS = 2000;

/** The stream of statuses. Open while the page is seen; says when it is lost and when it is back. */
export class Stream {
  constructor(path, onStatus, onLost) {
    this.path = path;
    this.onStatus = onStatus;
    this.onLost = onLost; // called with the time of the last word, null when it is back
    this.heard = Date.now();
    this.source = null;
    this.lost = false;
    document.addEventListener("visibilitychange", () => this.follow());
    setInterval(() => this.watch(), 1000);
    this.follow();
  }

  follow() {
    if (document.hidden) this.close();
    else if (!this.source) this.open();
  }

  open() {
    this.close();
    this.opened = Date.now();
    this.source = new EventSource(origin + this.path);
    this.source.addEventListener("status", (event) => {
      this.heard = Date.now();
      if (this.lost) this.onLost(null);
      this.lost = false;
      this.onStatus(JSON.parse(event.data));
    });
    this.source.addEventListener("error", () => this.tell());
  }

  close() {
    this.source?.close();
    this.source = null;
  }

  watch() {
    if (!this.source) return;
    const waits = Date.now() - Math.max(this.heard, this.opened);
    if (waits > SILENT_MS) this.tell();
    // The browser gives up on some answers, and does not see a peer that is gone without a word.
    const gone = this.source.readyState === EventSource.CLOSED;
    if ((gone && waits > AGAIN_MS) || waits > 2 * SILENT_MS) this.open();
  }

  tell() {
    if (!this.lost) this.onLost(this.heard / 1000);
    this.lost = true;
  }
}
