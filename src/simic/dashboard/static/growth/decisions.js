/**
 * The decisions taken in a host: a table of all, and everything about the selected one.
 */

import { OPS } from "../lib/colours.js";
import { h } from "../lib/dom.js";
import { chance, known, metric, NONE, short, signed, whole, words } from "../lib/format.js";
import { jointProbability, termNames } from "./host.js";
import { barSize, rewardBar, rewardNumbers } from "./rewards.js";

/** @typedef {import("./host.js").Host} Host */
/** @typedef {import("./host.js").Decision} Decision */

/** The most rows of the table: a training of a user's own may have thousands of decisions. */
const ROWS = 200;
/** Heads in the order in which they are decided. */
const HEADS = ["op", "slot", "blueprint", "style", "tempo", "alpha_target", "alpha_speed", "alpha_curve"];

/** @param {string} head */
const headRank = (head) => (HEADS.includes(head) ? HEADS.indexOf(head) : HEADS.length);

/** @typedef {{label: string, class: string | null, cell: (own: Decision, names: string[], top: number) => any, has?: (own: Decision) => boolean}} Column */
/** Columns of the table; those that no decision `has` are left out. @type {Column[]} */
const COLUMNS = [
  { label: "Action", class: null, cell: (own) => [opMark(own.op), h("span", { class: "action" }, actionText(own))] },
  { label: "Prob.", class: "number", cell: (own) => chance(jointProbability(own)), has: (own) => jointProbability(own) !== null },
  { label: "Legal", class: "number roomy", cell: (own) => whole(own.legal_ops?.length), has: (own) => Boolean(own.legal_ops?.length) },
  { label: "Accuracy", class: "number roomy", cell: (own) => metric(own.val_accuracy), has: (own) => known(own.val_accuracy) },
  { label: "Reward", class: "number", cell: (own) => signed(own.reward, 2), has: (own) => known(own.reward) },
  { label: "Made of", class: "bar-cell", cell: (own, names, top) => rewardBar(own.reward_terms ?? {}, names, top), has: (own) => barSize(own.reward_terms) > 0 },
];

/** Everything about one decision. @param {Host} host @param {number} t */
export function decisionDetail(host, t) {
  const own = host.decisions[t];
  if (!own) return h("p", { class: "soft" }, "No decision was taken here.");
  const names = termNames([host]);
  const heads = Object.entries(own.probabilities ?? {}).filter(([, p]) => known(p)).sort(([a], [b]) => headRank(a) - headRank(b));
  const terms = own.reward_terms ?? {};
  return h(
    "div",
    { class: "decision" },
    h("h3", {}, `Decision ${whole(own.decision)} `, opMark(own.op), h("span", { class: "action" }, actionText(own))),
    h("div", { class: "decision-parts" }, [
      heads.length ? h("div", {}, h("h4", {}, "Probability"), probabilities(heads, jointProbability(own))) : null,
      h("div", {}, [
        own.legal_ops?.length ? [h("h4", {}, "Legal operations"), legal(own)] : null,
        h("h4", {}, "Host"),
        h("p", { class: "pairs" }, pair("value", signed(own.value, 3)), pair("accuracy", metric(own.val_accuracy)), pair("loss", short(own.val_loss))),
      ]),
      known(own.reward) ? h("div", {}, h("h4", {}, "Reward ", h("b", {}, signed(own.reward, 3))), rewardBar(terms, names, barSize(terms) || 1), rewardNumbers(terms, names)) : null,
    ]),
  );
}

/** @param {Host} host @param {number} selected @param {(t: number) => void} pick */
export function decisionTable(host, selected, pick) {
  const names = termNames([host]);
  const top = Math.max(1e-9, ...host.decisions.map((own) => barSize(own.reward_terms)));
  const from = Math.max(0, Math.min(selected - ROWS / 2, host.decisions.length - ROWS));
  const shown = host.decisions.slice(from, from + ROWS);
  const columns = COLUMNS.filter(({ has }) => !has || host.decisions.some(has));
  const rows = shown.map((own, i) => {
    const t = from + i;
    const pressed = t === selected ? "true" : "false";
    const button = h("button", { type: "button", class: "plain", "data-key": `decision-${t}`, "aria-pressed": pressed, "aria-label": `Decision ${own.decision}` }, whole(own.decision));
    return h(
      "tr",
      { "data-selected": t === selected ? "" : null, onclick: () => pick(t) },
      h("td", { class: "number" }, button),
      columns.map(({ cell, class: name }) => h("td", { class: name }, cell(own, names, top))),
    );
  });
  const part = shown.length < host.decisions.length ? h("p", { class: "soft" }, `${whole(shown.length)} of ${whole(host.decisions.length)} decisions, around the selected one`) : null;
  return h(
    "div",
    { class: "wide tall", "data-scroll": "decisions", tabindex: 0, role: "group", "aria-label": `Decisions of host ${host.id}` },
    h(
      "table",
      { class: "decisions" },
      h("caption", { class: "hidden" }, `Decisions of host ${host.id}`),
      h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "number" }, "#"), columns.map(({ label, class: name }) => h("th", { scope: "col", class: name }, label)))),
      h("tbody", {}, rows),
    ),
    part,
  );
}

/** An operation with its colour. @param {string} op */
function opMark(op) {
  const variable = OPS[/** @type {keyof typeof OPS} */ (op)] ?? "--op-wait";
  return h("span", { class: "op", style: { "--colour": `var(${variable})` } }, words(op));
}

/** The rest of an action: its slot first, then the other heads as they were printed. @param {Decision} own */
function actionText(own) {
  const parts = own.action.split(" ").slice(1).map((part) => part.split("="));
  const plain = parts.filter(([head, value]) => value === undefined || head === "slot" || head === "blueprint").map((part) => part[part.length - 1]);
  const others = parts.filter(([head, value]) => value !== undefined && head !== "slot" && head !== "blueprint").map(([head, value]) => `${words(head)} ${value}`);
  return h("span", {}, ` ${plain.join(" ")}`, others.length ? h("small", {}, ` ${others.join(", ")}`) : null);
}

/** @param {[string, any][]} heads @param {number | null} joint */
function probabilities(heads, joint) {
  return h(
    "ul",
    { class: "probabilities" },
    heads.map(([head, p]) => h("li", {}, h("span", {}, words(head)), h("span", { class: "meter", "aria-hidden": "true", style: { "--share": String(p) } }), h("b", {}, chance(p)))),
    heads.length > 1 ? h("li", { class: "joint" }, h("span", {}, "all together"), h("span", {}), h("b", {}, chance(joint))) : null,
  );
}

/** @param {Decision} own */
function legal(own) {
  return h("ul", { class: "chips" }, own.legal_ops.map((op) => h("li", { "data-chosen": op === own.op ? "" : null }, opMark(op), op === own.op ? " chosen" : "")));
}

/** @param {string} label @param {string} value */
const pair = (label, value) => (value === NONE ? null : h("span", {}, `${label} `, h("b", {}, value)));
