/**
 * What a reward is made of: one stacked bar around zero, and its numbers.
 */

import { termVariable } from "../lib/colours.js";
import { h } from "../lib/dom.js";
import { known, signed, words } from "../lib/format.js";

/**
 * The bar alone. @param {Record<string, number | null>} terms @param {string[]} names all terms, in their fixed order
 * @param {number} top the sum that fills one half
 */
export function rewardBar(terms, names, top) {
  const part = (/** @type {string} */ name) => {
    const share = Math.min(1, Math.abs(terms[name] ?? 0) / top);
    return h("span", { style: { "--share": String(share), "--colour": `var(${termVariable(name, names)})` } });
  };
  const given = names.filter((name) => known(terms[name]) && terms[name] !== 0);
  const down = given.filter((name) => /** @type {number} */ (terms[name]) < 0);
  const up = given.filter((name) => /** @type {number} */ (terms[name]) > 0);
  return h("span", { class: "reward-bar", "aria-hidden": "true" }, h("span", { class: "down" }, down.map(part)), h("span", { class: "up" }, up.map(part)));
}

/** The numbers. @param {Record<string, number | null>} terms @param {string[]} names */
export function rewardNumbers(terms, names) {
  const given = names.filter((name) => known(terms[name]));
  if (!given.length) return h("p", { class: "soft" }, "Its terms were not recorded.");
  return h(
    "ul",
    { class: "legend" },
    given.map((name) =>
      h("li", { style: { "--colour": `var(${termVariable(name, names)})` } }, h("span", { class: "swatch" }), words(name), " ", h("b", {}, signed(terms[name], 3))),
    ),
  );
}

/** The larger of both halves of a decision's bar. @param {Record<string, number | null>} terms */
export function barSize(terms) {
  const values = Object.values(terms ?? {}).filter(known);
  const sum = (/** @type {1 | -1} */ sign) => values.filter((own) => own * sign > 0).reduce((total, own) => total + Math.abs(own), 0);
  return Math.max(sum(1), sum(-1));
}
