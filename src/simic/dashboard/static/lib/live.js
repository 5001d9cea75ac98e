/**
 * Keeps a RunStore up to date: one view, then the stream of changes; after a break it catches up from its cursor.
 *
 * A hidden tab closes its stream, since browsers open only six connections to one server, and catches up when it is
 * shown again. Where the server has no stream to spare it is asked every few seconds instead.
 */

import { ApiError, askRun } from "./api.js";

/** @typedef {import("./run_store.js").RunStore} RunStore */
/** @typedef {import("./run_store.js").Change} Change */
/** @typedef {{state: "connecting" | "live" | "polling" | "retrying" | "refused" | "idle", text: string}} Connection */

const RETRY_SECONDS = [1, 2, 3, 5, 8];
const POLL_SECONDS = 3;

export class LiveRun {
  /**
   * @param {RunStore} store
   * @param {(change: Change) => void} changed
   * @param {(connection: Connection) => void} connected
   * @param {{stream?: boolean}} [options] without a stream the server is asked every few seconds
   */
  constructor(store, changed, connected, { stream = true } = {}) {
    this.store = store;
    this.changed = changed;
    this.connected = connected;
    this.stream = stream;
    this.failures = 0;
    this.attempt = 0;
    /** @type {EventSource | null} */
    this.source = null;
    this.timer = 0;
    this.watched = () => (document.hidden ? this.pause() : this.connect());
    document.addEventListener("visibilitychange", this.watched);
  }

  /** Ask for what is new, then listen. */
  async connect() {
    this.close();
    const attempt = ++this.attempt;
    if (!this.store.now && !this.failures) this.connected({ state: "connecting", text: "Connecting…" });
    try {
      const view = await askRun(this.store.id, "view", { since: this.store.cursor });
      if (attempt !== this.attempt) return;
      this.apply(view);
    } catch (error) {
      if (attempt === this.attempt) this.failed(error);
      return;
    }
    if (this.stream) this.listen();
    else this.later(POLL_SECONDS);
  }

  /** Stop for good. */
  stop() {
    document.removeEventListener("visibilitychange", this.watched);
    this.pause();
  }

  pause() {
    this.attempt++;
    this.close();
    this.connected({ state: "idle", text: "Paused" });
  }

  listen() {
    const query = new URLSearchParams({ since: this.store.cursor ?? "" });
    const source = new EventSource(`/api/run/${encodeURIComponent(this.store.id)}/stream?${query}`);
    this.source = source;
    let opened = false;
    source.onopen = () => {
      opened = true;
      this.failures = 0;
      this.connected({ state: "live", text: "Live" });
    };
    source.onmessage = (message) => this.apply(JSON.parse(message.data));
    source.onerror = () => {
      this.close();
      if (opened) this.failed(new ApiError("The connection was lost.", 0));
      else {
        this.connected({ state: "polling", text: `Every ${POLL_SECONDS} s` });
        this.later(POLL_SECONDS);
      }
    };
  }

  /** @param {any} view */
  apply(view) {
    const change = this.store.apply(view);
    if (!this.stream) this.failures = 0;
    this.changed(change);
  }

  /** @param {unknown} error */
  failed(error) {
    if (error instanceof ApiError && !error.passing) {
      this.connected({ state: "refused", text: error.message });
      return;
    }
    if (!(error instanceof ApiError)) throw error;
    const seconds = RETRY_SECONDS[Math.min(this.failures++, RETRY_SECONDS.length - 1)];
    this.connected({ state: "retrying", text: `Disconnected, retrying every ${seconds} s` });
    this.later(seconds);
  }

  /** @param {number} seconds */
  later(seconds) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.connect(), 1000 * seconds);
  }

  close() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }
}
