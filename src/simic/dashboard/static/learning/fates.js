/**
 * Fates of seeds by blueprint: how many germinated, how many were kept, how many pruned.
 */

import { h } from "../lib/dom.js";
import { NONE, percent, plural, whole } from "../lib/format.js";

/** @typedef {{germinated: number, fossilized: number, pruned: number}} Fate */

/** Sum over updates. @param {import("../lib/run_store.js").Row[]} rows @returns {[string, Fate][]} most frequent first */
export function countFates(rows) {
  /** @type {Map<string, Fate>} */
  const fates = new Map();
  for (const row of rows) {
    for (const [blueprint, counts] of Object.entries(row.seeds ?? {})) {
      const sum = fates.get(blueprint) ?? { germinated: 0, fossilized: 0, pruned: 0 };
      for (const name of /** @type {(keyof Fate)[]} */ (Object.keys(sum))) sum[name] += counts[name] ?? 0;
      fates.set(blueprint, sum);
    }
  }
  return [...fates].sort(([, a], [, b]) => b.germinated - a.germinated);
}

/** @param {string} name of the run @param {import("../lib/run_store.js").Row[]} rows */
export function fatesFigure(name, rows) {
  const fates = countFates(rows);
  if (!fates.length) return null;
  const top = Math.max(...fates.map(([, own]) => own.germinated), 1);
  const total = fates.reduce((sum, [, own]) => sum + own.germinated, 0);
  const part = (/** @type {string} */ kind, /** @type {number} */ amount) => h("span", { class: kind, style: { "--share": String(amount / top) } });
  return h(
    "figure",
    { class: "panel chart" },
    h("figcaption", {}, h("strong", {}, "Fates of seeds"), h("span", { class: "soft" }, ` ${plural(total, "seed")}${name ? `, ${name}` : ""}`)),
    h(
      "div",
      { class: "wide", tabindex: 0, role: "group", "aria-label": `Fates of seeds ${name}` },
      h(
        "table",
        { class: "fates" },
        h("thead", {}, h("tr", {}, ["Blueprint", "", "Germinated", "Fossilized", "Pruned", "Kept"].map((text, i) => (text ? h("th", { scope: "col", class: i > 1 ? "number" : null }, text) : h("td", {}))))),
        h("tbody", {}, fates.map(([blueprint, own]) =>
          h("tr", {}, [
            h("th", { scope: "row" }, blueprint),
            h("td", { class: "fate-cell", "aria-hidden": "true" }, h("span", { class: "fate-bar" }, part("kept", own.fossilized), part("cut", own.pruned), part("open", Math.max(0, own.germinated - own.fossilized - own.pruned)))),
            h("td", { class: "number" }, whole(own.germinated)),
            h("td", { class: "number" }, whole(own.fossilized)),
            h("td", { class: "number" }, whole(own.pruned)),
            h("td", { class: "number" }, own.germinated ? percent(own.fossilized / own.germinated) : NONE),
          ]),
        )),
      ),
    ),
    h("ul", { class: "legend" }, [["kept", "fossilized"], ["cut", "pruned"], ["open", "still live at the end"]].map(([kind, text]) => h("li", {}, h("span", { class: `swatch fate-${kind}` }), text))),
  );
}
