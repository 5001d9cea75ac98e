/**
 * What the page knows of one run: the views that the server sent, applied one after the other.
 */

/** Of long runs a row stands for the updates from `first` on: its seeds and anomalies are theirs too.
 * @typedef {{update: number, first?: number, metrics: Record<string, number | null>, spread?: Record<string, (number | null)[]>,
 *   seeds?: Record<string, Record<string, number>>,
 *   anomalies?: {name: string, where: string, value: number | null, threshold: number | null}[]}} Row */
/** @typedef {{index: number, time: number | null, update: number | null, kind: string, severity: string,
 *   host: string | null, text: string, slot?: string | null, decision?: number | null}} Entry */
/** @typedef {{now: boolean, rows: boolean, growth: boolean, story: boolean, reset: boolean}} Change */

const MAX_ENTRIES = 20_000;

export class RunStore {
  /** @param {string} id */
  constructor(id) {
    this.id = id;
    /** @type {string | null} */
    this.cursor = null;
    /** @type {any} */
    this.now = null;
    /** @type {Row[]} ascending by update */
    this.rows = [];
    /** @type {any} */
    this.growth = null;
    /** @type {Entry[]} ascending by index */
    this.entries = [];
    this.total = 0;
  }

  /**
   * Apply a view of the server.
   * @param {any} view
   * @returns {Change} what is new
   */
  apply(view) {
    if (view.reset) {
      this.rows = [];
      this.entries = [];
      this.growth = null;
      this.total = 0;
    }
    const rows = view.learning?.rows ?? [];
    const entries = view.story?.entries ?? [];
    const grown = Boolean(view.growth);
    this.now = view.now ?? this.now;
    this.cursor = view.cursor ?? this.cursor;
    if (rows.length) this.rows = merge(withoutMerged(this.rows, rows), rows, "update");
    if (entries.length) this.entries = merge(this.entries, entries, "index").slice(-MAX_ENTRIES);
    if (grown) this.growth = view.growth;
    this.total = view.story?.total ?? this.total;
    const reset = Boolean(view.reset);
    return { now: true, rows: reset || rows.length > 0, growth: reset || grown, story: reset || entries.length > 0, reset };
  }

  /** The anomalies of all updates. */
  get anomalies() {
    return this.rows.flatMap((row) => (row.anomalies ?? []).map((anomaly) => ({ update: row.update, ...anomaly })));
  }
}

/** Rows without those that a fresh row now stands for. @param {Row[]} old @param {Row[]} fresh */
function withoutMerged(old, fresh) {
  const spans = fresh.filter((row) => (row.first ?? row.update) < row.update);
  if (!spans.length) return old;
  return old.filter((row) => !spans.some((span) => (span.first ?? 0) <= row.update && row.update < span.update));
}

/**
 * Two sorted lists as one; of two with the same key the newer counts.
 * @template {Record<string, any>} T
 * @param {T[]} old @param {T[]} fresh @param {string} key
 * @returns {T[]}
 */
function merge(old, fresh, key) {
  if (!old.length || !fresh.length || old[old.length - 1][key] < fresh[0][key]) return old.concat(fresh);
  const all = new Map(old.map((item) => [item[key], item]));
  for (const item of fresh) all.set(item[key], item);
  return [...all.values()].sort((a, b) => a[key] - b[key]);
}
