/**
 * Comparing runs: which are chosen, and the settings in which they differ.
 */

import { listText, runAddress } from "../lib/address.js";
import { seriesVariable } from "../lib/colours.js";
import { h, table } from "../lib/dom.js";
import { fixed, NONE, plural, setting, signed } from "../lib/format.js";

/** The largest number of runs beside the first. */
export const MAX_OTHERS = 5;

/** @typedef {import("../lib/run_store.js").RunStore} RunStore */

/** Settings that are not the same in all runs. @param {RunStore[]} runs @returns {{name: string, values: any[]}[]} */
export function differingSettings(runs) {
  const configs = runs.map((run) => run.now?.config ?? {});
  const names = [...new Set(configs.flatMap((config) => Object.keys(config)))].sort();
  return names
    .map((name) => ({ name, values: configs.map((config) => config[name]) }))
    .filter(({ values }) => new Set(values.map((value) => JSON.stringify(value))).size > 1);
}

/** @param {RunStore[]} runs */
export function comparisonPanel(runs) {
  if (runs.length < 2) return null;
  const found = runs.every((run) => run.now) ? differingSettings(runs) : null;
  const head = [h("span", { class: "hidden" }, "Figure or setting"), ...runs.map((run, i) => [key(i), run.id])];
  const rows = [
    ["score", ...runs.map((run) => fixed(run.now?.score, 2))],
    ["gain over twins", ...runs.map((run) => signed(run.now?.gain, 2))],
    ["updates", ...runs.map((run) => (run.now ? `${run.now.update ?? NONE} of ${run.now.updates ?? NONE}` : NONE))],
    ["status", ...runs.map((run) => run.now?.status ?? "loading")],
    ...(found ?? []).map(({ name, values }) => [h("code", {}, name), ...values.map((value) => h("code", {}, setting(value)))]),
  ];
  const said = found === null ? "Loading…" : found.length ? `They differ in ${plural(found.length, "setting")}.` : "All settings are the same.";
  return h("section", { class: "panel", "aria-labelledby": "differences" }, h("h2", { id: "differences" }, "Runs compared"), h("p", { class: "soft" }, said), table({ caption: "Settings that differ", head: /** @type {any[]} */ (head), rows, class: "differences" }));
}

/** The form that chooses runs. @param {string} id @param {string[]} others @param {{id: string, name: string, score: number | null}[]} all @param {(address: string) => void} go */
export function comparisonForm(id, others, all, go) {
  const toggle = (/** @type {string} */ other, /** @type {boolean} */ on) => {
    const next = on ? [...others, other].slice(0, MAX_OTHERS) : others.filter((own) => own !== other);
    go(runAddress(id, "learning", { with: listText(next) }));
  };
  const choices = all.filter((run) => run.id !== id);
  return h(
    "details",
    { class: "menu", "data-key": "compare" },
    h("summary", {}, others.length ? `Compared with ${plural(others.length, "run")}` : "Compare with…"),
    h("fieldset", {}, h("legend", { class: "hidden" }, "Runs to compare with"), choices.length ? choices.map((run) => {
      const box = h("input", { type: "checkbox", "data-key": `with-${run.id}`, onchange: () => toggle(run.id, box.checked) });
      box.checked = others.includes(run.id);
      box.disabled = !box.checked && others.length >= MAX_OTHERS;
      return h("label", {}, box, " ", run.id, h("span", { class: "soft" }, ` ${fixed(run.score, 1)}`));
    }) : h("p", { class: "soft" }, "There is no other run.")),
  );
}

/** The sign of a run in charts: its colour and dashes. @param {number} i */
function key(i) {
  return h("span", { class: "line-swatch", "data-dash": i % 4 || null, style: { "--colour": `var(${seriesVariable(i)})` }, "aria-hidden": "true" });
}
