/**
 * What the charts of Learning show: each takes the rows of one or several runs and gives the data of a chart.
 */

import { OPS, seriesVariable, termOrder, termVariable } from "../lib/colours.js";
import { known, percent, words } from "../lib/format.js";

/** @typedef {import("../lib/run_store.js").Row} Row */
/** @typedef {import("../lib/charts.js").ChartData} ChartData */
/** @typedef {{id: string, name: string, rows: Row[], anomalies: {update: number, name: string, where: string}[]}} RunRows */

const MAX_OWN = 24;

/** Charts of one metric per run; several runs are overlaid. */
const METRICS = [
  { key: "score", title: "Score", unit: "points", spread: "score" },
  { key: "gain", title: "Gain over twins", unit: "points", spread: "gain" },
  { key: "growth", title: "Growth", unit: "doublings of parameters", spread: "growth" },
  { key: "episode_return", title: "Return of an episode", unit: "reward" },
  { key: "kl_after", title: "KL divergence after the update", unit: "nats" },
  { key: "explained_variance", title: "Explained variance of values", unit: "share" },
  { key: "gradient_norm", title: "Gradient norm of the policy", unit: "before clipping" },
  { key: "state_rms", title: "Recurrent state", unit: "root mean square" },
  { key: "loss", title: "Loss", unit: "imitation, nats" },
  { key: "q_loss", title: "Q loss", unit: "offline learning" },
];

/** @typedef {{key: string, make: (shown: RunRows[], all: RunRows[]) => ChartData | null, each: boolean}} Panel
 * `each`: one chart per run, with the same colours in all */

/** @type {Panel[]} */
export const PANELS = [
  ...METRICS.slice(0, 3).map(metricPanel),
  { key: "op", make: ([run]) => actionMix(run), each: true },
  { key: "reward", make: ([run], all) => rewardTerms(run, all), each: true },
  ...METRICS.slice(3, 5).map(metricPanel),
  { key: "head_entropy", make: ([run], all) => heads(run, all, "head_entropy/", "Entropy of each head", "share of its maximum"), each: true },
  { key: "head_accuracy", make: ([run], all) => heads(run, all, "head_accuracy/", "Accuracy of each head", "share of the recorded choices"), each: true },
  ...METRICS.slice(5).map(metricPanel),
];

/** One metric of all runs, by its name in events. @param {string} name @returns {Panel} */
export const namedPanel = (name) => metricPanel({ key: name, title: words(name), unit: "" });

/** The charts of a user's own training, whose metrics have any names. @param {RunRows[]} runs */
export const ownPanels = (runs) => metricNames(runs).slice(0, MAX_OWN).map((name) => namedPanel(name));

/** All metrics that the runs have. @param {RunRows[]} runs @returns {string[]} */
export const metricNames = (runs) => [...new Set(runs.flatMap((run) => run.rows.slice(-50).flatMap((row) => Object.keys(row.metrics))))].sort();

/** @param {{key: string, title: string, unit?: string, spread?: string}} metric @returns {Panel} */
function metricPanel({ key, title, unit, spread }) {
  return { key, each: false, make: (runs) => overlay(runs, key, title, unit ?? "", spread) };
}

/** @param {RunRows[]} runs @param {string} key @param {string} title @param {string} unit @param {string} [spread] @returns {ChartData | null} */
function overlay(runs, key, title, unit, spread) {
  const having = runs.filter((run) => run.rows.some((row) => known(row.metrics[key])));
  if (!having.length) return null;
  const x = [...new Set(having.flatMap((run) => run.rows.map((row) => row.update)))].sort((a, b) => a - b);
  let spreads = false;
  const lines = having.map((run) => {
    const number = runs.indexOf(run);
    const at = new Map(run.rows.map((row) => [row.update, row]));
    const column = (/** @type {(row: Row) => number | null | undefined} */ read) => x.map((update) => {
      const row = at.get(update);
      return row ? (read(row) ?? null) : null;
    });
    const has = spread && run.rows.some((row) => row.spread?.[spread]?.some(known));
    spreads ||= Boolean(has);
    return {
      label: runs.length > 1 ? run.name : has ? "mean of hosts" : words(key),
      colour: seriesVariable(number),
      dash: number,
      values: column((row) => row.metrics[key]),
      band: has ? /** @type {[any, any]} */ ([column((row) => row.spread?.[spread ?? ""]?.[0]), column((row) => row.spread?.[spread ?? ""]?.[2])]) : undefined,
    };
  });
  const marks = runs.length > 1 ? [] : marksOf(runs[0]);
  return { title, unit, note: spreads ? "band: 10–90 % of hosts" : "", x, lines, marks };
}

/** @param {RunRows} run @returns {ChartData | null} */
function actionMix(run) {
  const known = Object.keys(OPS).filter((op) => run.rows.some((row) => `op/${op}` in row.metrics));
  const others = namesOf(run, "op/").filter((op) => !(op in OPS));
  const lines = [...known, ...others].map((op, i) => ({
    label: words(op),
    colour: OPS[/** @type {keyof typeof OPS} */ (op)] ?? seriesVariable(i),
    values: run.rows.map((row) => row.metrics[`op/${op}`] ?? null),
  }));
  return stacked(run, "Action mix", "share of decisions", lines, (value) => percent(value));
}

/** @param {RunRows} run @param {RunRows[]} all @returns {ChartData | null} */
function rewardTerms(run, all) {
  const names = termOrder(all.flatMap((own) => namesOf(own, "reward/")));
  const lines = names.map((term) => ({
    label: words(term),
    colour: termVariable(term, names),
    values: run.rows.map((row) => row.metrics[`reward/${term}`] ?? null),
  }));
  return stacked(run, "Reward terms", "sum over an episode", lines);
}

/** One line per head. @param {RunRows} run @param {RunRows[]} all @param {string} prefix @param {string} title @param {string} unit @returns {ChartData | null} */
function heads(run, all, prefix, title, unit) {
  const names = [...new Set(all.flatMap((own) => namesOf(own, prefix)))].sort();
  const lines = names.map((head, i) => ({
    label: words(head),
    colour: seriesVariable(i),
    dash: Math.floor(i / 3),
    values: run.rows.map((row) => row.metrics[prefix + head] ?? null),
  }));
  if (!lines.some((line) => line.values.some(known))) return null;
  return { title, unit, x: updatesOf(run), lines, marks: marksOf(run) };
}

/** @param {RunRows} run @param {string} title @param {string} unit @param {any[]} lines @param {(value: number | null) => string} [digits] @returns {ChartData | null} */
function stacked(run, title, unit, lines, digits) {
  const used = lines.filter((line) => line.values.some((/** @type {any} */ own) => known(own) && own !== 0));
  return used.length ? { title, unit, x: updatesOf(run), lines: used, marks: marksOf(run), stacked: true, digits } : null;
}

/** @param {RunRows} run */
const updatesOf = (run) => run.rows.map((row) => row.update);

/** @param {RunRows} run */
const marksOf = (run) => run.anomalies.map(({ update, name, where }) => ({ update, label: `${words(name)} ${where}` }));

/** Names of the metrics with a prefix, without it. @param {RunRows} run @param {string} prefix */
function namesOf(run, prefix) {
  const names = new Set(run.rows.flatMap((row) => Object.keys(row.metrics).filter((name) => name.startsWith(prefix))));
  return [...names].map((name) => name.slice(prefix.length));
}
