/**
 * An evaluation: controllers compared on the same hosts, with their intervals.
 */

import { ask } from "../lib/api.js";
import { h, replace, s, table } from "../lib/dom.js";
import { fatesFigure } from "../learning/fates.js";
import { ago, fixed, known, moment, NONE, plural, setting, short, signed } from "../lib/format.js";

const ROW = 26;

/** @typedef {{mean: number, low?: number, high?: number, probability?: number}} Estimate */

/** @param {import("../app.js").Context} context @returns {import("../app.js").View} */
export function evaluationView({ route, connected }) {
  const element = h("div", { class: "evaluation" }, h("p", { class: "notice" }, "Loading…"));
  ask(`evaluation/${encodeURIComponent(route.id)}`).then(
    (found) => replace(element, content(found)),
    (error) => connected({ state: "refused", text: error.message }),
  );
  return { element };
}

/** @param {any} found */
function content(found) {
  const alone = found.controllers.filter((/** @type {any} */ own) => !own.member_of);
  const hosts = found.tasks.length * found.rng_seeds;
  return [
    h("div", { class: "heading" }, h("h1", {}, found.name), h("p", { class: "soft" }, `${plural(alone.length, "controller")} on ${plural(hosts, "host")} of ${plural(found.tasks.length, "task")}, ${ago(found.modified)} (${moment(found.modified)})`)),
    found.notes?.length ? h("ul", { class: "notice" }, found.notes.map((/** @type {string} */ note) => h("li", {}, note))) : null,
    h("div", { class: "columns" }, [
      h("section", { class: "panel", "aria-labelledby": "t-scores" }, h("h2", { id: "t-scores" }, "Mean score"), h("p", { class: "soft" }, "points, with 95 % interval"), forest(alone.map((/** @type {any} */ own) => ({ name: own.name, estimate: own.score, strong: own.learned })), fixed)),
      found.paired?.length ? h("section", { class: "panel", "aria-labelledby": "t-paired" }, h("h2", { id: "t-paired" }, "On the same hosts"), paired(found.paired)) : null,
    ]),
    h("section", { class: "panel", "aria-labelledby": "t-all" }, h("h2", { id: "t-all" }, "Controllers"), controllerTable(found.controllers)),
    found.tasks.length > 1 ? h("section", { class: "panel", "aria-labelledby": "t-tasks" }, h("h2", { id: "t-tasks" }, "Mean score by task"), taskTable(found, alone)) : null,
    fatesSection(found.fates ?? {}),
    h("details", { class: "panel" }, h("summary", {}, "Command, settings and versions"), found.command ? h("pre", { tabindex: 0 }, String(found.command)) : null, pairsTable({ ...found.settings, ...found.versions })),
  ];
}

/** Dots with intervals on one axis. @param {{name: string, estimate: Estimate, strong?: boolean}[]} rows @param {(value: number, digits: number) => string} format */
function forest(rows, format) {
  const edges = rows.flatMap(({ estimate: e }) => [e.mean, e.low ?? e.mean, e.high ?? e.mean]).filter(known);
  const zero = format === signed ? [0] : [];
  const [low, high] = [Math.min(...edges, ...zero), Math.max(...edges, ...zero)];
  const at = (/** @type {number | undefined} */ value) => `${3 + (94 * ((value ?? low) - low)) / (high - low || 1)}%`;
  return h(
    "ul",
    { class: "forest" },
    rows.map(({ name, estimate: e, strong }) =>
      h(
        "li",
        { class: strong ? "own" : null },
        h("span", { class: "forest-name" }, name),
        s(
          "svg",
          { width: "100%", height: ROW, "aria-hidden": "true" },
          zero.length ? s("line", { class: "zero", x1: at(0), x2: at(0), y1: 0, y2: ROW }) : null,
          s("line", { class: "span", x1: at(e.low), x2: at(e.high), y1: ROW / 2, y2: ROW / 2 }),
          s("circle", { cx: at(e.mean), cy: ROW / 2, r: 4.5 }),
        ),
        h("b", {}, format(e.mean, 2)),
        h("span", { class: "soft" }, `${format(e.low ?? e.mean, 2)} to ${format(e.high ?? e.mean, 2)}`),
      ),
    ),
  );
}

/** @param {any[]} pairs */
function paired(pairs) {
  const groups = Map.groupBy(pairs, (own) => own.controller);
  return [...groups].map(([name, own]) => [
    h("h3", {}, `${name} minus …`),
    forest(own.map((/** @type {any} */ pair) => ({ name: pair.other, estimate: pair.score })), signed),
    h("ul", { class: "verdicts" }, own.map((/** @type {any} */ pair) => h("li", {}, pair.sentence))),
  ]);
}

/** @param {any[]} controllers */
function controllerTable(controllers) {
  const interval = (/** @type {Estimate | undefined} */ e, /** @type {(v: any) => string} */ format) => (e ? [h("b", {}, format(e.mean)), h("small", {}, ` ${format(e.low)} – ${format(e.high)}`)] : NONE);
  const two = (/** @type {any} */ value) => fixed(value, 2);
  const rows = controllers.map((own) => [
    own.member_of ? h("span", { class: "member" }, own.name) : h("strong", {}, own.name),
    interval(own.score, two),
    interval(own.metric, two),
    interval(own.area, two),
    interval(own.parameters, short),
    interval(own.flops, short),
    own.description ?? "",
  ]);
  const head = ["Controller", "Score", "Test metric, %", "Area, %", "Parameters", "Compute, FLOP", "What it is"];
  return table({ caption: "Controllers, best first", head, rows: /** @type {any} */ (rows), numeric: [1, 2, 3, 4, 5] });
}

/** @param {any} found @param {any[]} controllers */
function taskTable(found, controllers) {
  const rows = found.tasks.map((/** @type {string} */ task) => {
    const scores = controllers.map((own) => found.by_task?.[task]?.[own.name]);
    const best = Math.max(...scores.filter(known));
    return [task, ...scores.map((score) => (score === best ? h("b", { title: "best on this task" }, `★ ${fixed(score, 2)}`) : fixed(score, 2)))];
  });
  return table({ caption: "Mean score by task", head: ["Task", ...controllers.map((own) => own.name)], rows, numeric: controllers.map((_, i) => i + 1) });
}

/** @param {Record<string, Record<string, Record<string, number>>>} fates by controller and blueprint */
function fatesSection(fates) {
  const figures = Object.entries(fates).map(([controller, blueprints]) => {
    const seeds = Object.entries(blueprints).map(([blueprint, own]) => [blueprint, { ...own, germinated: Object.values(own).reduce((sum, count) => sum + count, 0) }]);
    return fatesFigure(controller, [{ update: 0, metrics: {}, seeds: Object.fromEntries(seeds) }]);
  });
  return figures.some(Boolean) ? h("div", { class: "charts" }, figures) : null;
}

/** @param {Record<string, any>} pairs */
function pairsTable(pairs) {
  const rows = Object.entries(pairs).map(([name, value]) => [h("code", {}, name), h("code", {}, setting(value))]);
  return table({ caption: "Settings and versions", head: ["Name", "Value"], rows });
}
