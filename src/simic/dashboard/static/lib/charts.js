/**
 * Charts over updates, drawn by uPlot: lines with a band of spread, and stacked bars around zero. Each has a legend with
 * the values under the pointer and a table with the same numbers.
 */

import uPlot from "../vendor/uPlot.esm.js";
import { colourOf, faded } from "./colours.js";
import { h, replace, table } from "./dom.js";
import { known, short, tick, whole } from "./format.js";

const HEIGHT = 190;
const TABLE_ROWS = 400;
const DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3]];
const SYNC = uPlot.sync("updates");

/** @typedef {{label: string, colour: string, values: (number | null)[], band?: [(number | null)[], (number | null)[]], dash?: number}} Line */
/** @typedef {{title: string, unit?: string, note?: string, x: number[], lines: Line[], marks?: {update: number, label: string}[],
 *   stacked?: boolean, digits?: (value: number | null) => string}} ChartData */

export class Chart {
  /** @param {string} key stays the same while the data change */
  constructor(key) {
    this.key = key;
    /** @type {any} */
    this.plot = null;
    /** @type {ChartData | null} */
    this.data = null;
    this.shape = "";
    this.canvas = h("div", { class: "chart-box", role: "img" });
    this.legend = h("ul", { class: "legend" });
    this.title = h("figcaption", {});
    this.body = h("div", {});
    this.details = h("details", { ontoggle: () => this.drawTable() }, h("summary", {}, "Table"), this.body);
    this.element = h("figure", { class: "panel chart" }, this.title, this.canvas, this.legend, this.details);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.canvas);
  }

  /** @param {ChartData} data */
  update(data) {
    const zoomed = this.zoomed;
    this.data = data;
    this.details.querySelector("summary").textContent = `Table of ${data.title}`;
    replace(this.title, h("strong", {}, data.title), data.unit ? h("span", { class: "soft" }, ` ${data.unit}`) : null, data.note ? h("small", {}, data.note) : null);
    this.canvas.setAttribute("aria-label", spokenSummary(data));
    const shape = JSON.stringify([data.stacked, data.lines.map((line) => [line.label, line.colour, Boolean(line.band), line.dash])]);
    if (this.plot && shape === this.shape) {
      this.plot.setData(columns(data), !zoomed);
      if (zoomed) this.plot.redraw();
    } else this.build();
    this.shape = shape;
    this.showValues(null);
    this.drawTable();
  }

  /** Whether a part of the updates was chosen by dragging: new data leave it as it is. */
  get zoomed() {
    if (!this.plot || !this.data?.x.length) return false;
    const { min, max } = this.plot.scales.x;
    const [low, high] = rangeX(this.data, -Infinity, Infinity);
    return min > low || max < high;
  }

  /** Draw anew, for instance in the colours of another theme. */
  build() {
    this.plot?.destroy();
    const width = this.canvas.clientWidth || 320;
    if (this.data) this.plot = new uPlot(this.options(width), columns(this.data), this.canvas);
  }

  resize() {
    const width = this.canvas.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }

  destroy() {
    this.observer.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }

  /** @param {number} width @returns {any} */
  options(width) {
    const data = /** @type {ChartData} */ (this.data);
    const font = "11px system-ui, sans-serif";
    const axis = { stroke: colourOf("--soft"), font, grid: { stroke: colourOf("--grid"), width: 1 }, ticks: { show: false } };
    const { series, bands } = data.stacked ? stackedSeries(data) : lineSeries(data);
    return {
      width,
      height: HEIGHT,
      padding: [8, 8, 0, 0],
      series: [{}, ...series],
      bands,
      legend: { show: false },
      cursor: { sync: { key: SYNC.key, setSeries: false }, points: { show: !data.stacked, size: 6 }, drag: { x: true, y: false } },
      scales: { x: { time: false, range: (/** @type {any} */ u, /** @type {number} */ low, /** @type {number} */ high) => rangeX(/** @type {ChartData} */ (this.data), low, high) }, y: { range: () => rangeY(/** @type {ChartData} */ (this.data)) } },
      axes: [
        { ...axis, size: 24, gap: 2, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 100000], values: (/** @type {any} */ u, /** @type {number[]} */ ticks) => ticks.map((own) => whole(own)) },
        { ...axis, size: labelWidth, gap: 4, values: (/** @type {any} */ u, /** @type {number[]} */ ticks) => ticks.map((own) => tick(Number(own.toPrecision(6)))) },
      ],
      hooks: {
        drawAxes: data.stacked ? [(/** @type {any} */ u) => drawStack(u, /** @type {ChartData} */ (this.data))] : [],
        draw: [(/** @type {any} */ u) => drawMarks(u, /** @type {ChartData} */ (this.data))],
        setCursor: [(/** @type {any} */ u) => this.showValues(u.cursor.idx ?? null)],
      },
    };
  }

  /** The legend with the values of one update, or of the newest. @param {number | null} index */
  showValues(index) {
    const data = this.data;
    if (!data) return;
    const format = data.digits ?? short;
    const at = index ?? data.x.length - 1;
    const items = data.lines.map((line) => {
      const value = index === null ? lastKnown(line.values) : line.values[at];
      const key = h("span", { class: data.stacked ? "swatch" : "line-swatch", "data-dash": line.dash || null });
      return h("li", { style: { "--colour": `var(${line.colour})` } }, key, line.label, " ", h("b", {}, format(value ?? null)));
    });
    const where = data.x.length ? h("li", { class: "soft" }, index === null ? "newest" : `update ${whole(data.x[at])}`) : null;
    this.legend.replaceChildren(...items, ...(where ? [where] : []));
  }

  drawTable() {
    const data = this.data;
    if (!data || !this.details.open) return;
    const from = Math.max(0, data.x.length - TABLE_ROWS);
    const format = data.digits ?? short;
    const head = ["Update", ...data.lines.flatMap((line) => (line.band ? [line.label, "10 %", "90 %"] : [line.label]))];
    const rows = data.x.slice(from).map((update, i) => [
      whole(update),
      ...data.lines.flatMap((line) => [line.values, ...(line.band ?? [])].map((values) => format(values[from + i] ?? null))),
    ]);
    replace(this.body, table({ caption: data.title, head, rows: rows.reverse(), numeric: head.map((_, i) => i) }));
  }
}

/** uPlot's columns: x, then values and both edges of the band of each line. @param {ChartData} data @returns {any} */
function columns(data) {
  if (data.stacked) return [data.x, ...data.lines.map((line) => line.values)];
  return [data.x, ...data.lines.flatMap((line) => (line.band ? [line.values, line.band[1], line.band[0]] : [line.values]))];
}

/** @param {ChartData} data */
function lineSeries(data) {
  const series = /** @type {any[]} */ ([]);
  const bands = /** @type {any[]} */ ([]);
  const lone = data.x.length < 2;
  for (const line of data.lines) {
    series.push({ stroke: colourOf(line.colour), width: 1.75, dash: DASHES[(line.dash ?? 0) % DASHES.length], points: { show: lone, size: 5 }, spanGaps: true });
    if (line.band) {
      const edge = { stroke: faded(line.colour, 0.35), width: 0.75, points: { show: false }, spanGaps: true };
      series.push(edge, { ...edge });
      bands.push({ series: [series.length - 1, series.length], fill: faded(line.colour, 0.14) });
    }
  }
  return { series, bands };
}

/** Bars are drawn by `drawStack`; the series only serve the pointer. @param {ChartData} data */
function stackedSeries(data) {
  const hidden = { paths: () => null, points: { show: false }, width: 0 };
  return { series: data.lines.map((line) => ({ ...hidden, stroke: colourOf(line.colour) })), bands: [] };
}

/** @param {any} u @param {ChartData} data */
function drawStack(u, data) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  const colours = data.lines.map((line) => colourOf(line.colour));
  data.x.forEach((x, i) => {
    const [left, right] = [Math.round(u.valToPos(x - 0.5, "x", true)), Math.round(u.valToPos(x + 0.5, "x", true))];
    const gap = right - left > 6 ? 1 : 0;
    let [up, down] = [0, 0];
    data.lines.forEach((line, k) => {
      const value = line.values[i];
      if (!known(value) || value === 0) return;
      const start = value > 0 ? up : down;
      const [a, b] = [u.valToPos(start, "y", true), u.valToPos(start + value, "y", true)];
      ctx.fillStyle = colours[k];
      ctx.fillRect(left + gap, Math.min(a, b), Math.max(1, right - left - 2 * gap), Math.abs(b - a));
      if (value > 0) up += value;
      else down += value;
    });
  });
  ctx.restore();
}

/** Vertical lines with a triangle at anomalies. @param {any} u @param {ChartData} data */
function drawMarks(u, data) {
  const { ctx, bbox } = u;
  const unit = devicePixelRatio;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = colourOf("--bad");
  ctx.lineWidth = 1;
  ctx.setLineDash([3 * unit, 3 * unit]);
  for (const update of new Set((data.marks ?? []).map((mark) => mark.update))) {
    const x = Math.round(u.valToPos(update, "x", true)) + 0.5; // on a pixel, not between two
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.beginPath();
    ctx.moveTo(x - 4 * unit, bbox.top);
    ctx.lineTo(x + 4 * unit, bbox.top);
    ctx.lineTo(x, bbox.top + 7 * unit);
    ctx.fill();
  }
  ctx.restore();
}

/** Room for the longest number. @param {any} u @param {string[] | null} labels */
const labelWidth = (u, labels) => Math.max(34, 12 + 6.5 * Math.max(0, ...(labels ?? []).map((own) => own.length)));

/** The shown updates: a chosen part as it is, all of them with half an update on both sides.
 * @param {ChartData} data @param {number} low @param {number} high @returns {[number, number]} */
function rangeX({ x }, low, high) {
  if (!x.length) return [0, 1];
  const [first, last] = [x[0], x[x.length - 1]];
  return [low <= first ? first - 0.5 : low, high >= last ? last + 0.5 : high];
}

/** @param {ChartData} data @returns {[number, number]} */
function rangeY(data) {
  let values = data.lines.flatMap((line) => [line.values, ...(line.band ?? [])]).flat().filter(known);
  if (data.stacked) {
    const sums = (/** @type {1 | -1} */ sign) => data.x.map((_, i) => data.lines.reduce((sum, line) => sum + Math.max(0, sign * (line.values[i] ?? 0)), 0));
    values = [0, ...sums(1), ...sums(-1).map((own) => -own)];
  }
  if (!values.length) return [0, 1];
  const [low, high] = values.reduce(([a, b], own) => [Math.min(a, own), Math.max(b, own)], [Infinity, -Infinity]);
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return data.stacked ? [low < 0 ? low - room : 0, high > 0 ? high + room : 0] : [low - room, high + room];
}

/** @param {(number | null)[]} values */
const lastKnown = (values) => values.findLast(known) ?? null;

/** @param {ChartData} data */
function spokenSummary(data) {
  if (!data.x.length) return `${data.title}: no data yet`;
  const format = data.digits ?? short;
  const ends = data.lines.map((line) => `${line.label} from ${format(line.values.find(known) ?? null)} to ${format(lastKnown(line.values))}`);
  return `${data.title}, updates ${data.x[0]} to ${data.x[data.x.length - 1]}: ${ends.join("; ")}`;
}
