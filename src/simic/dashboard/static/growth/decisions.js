/**
 * The decisions taken in a host: a table of all, and everything about the selected one.
 */

import { OPS } from "../lib/colours.js";
import { h } from "../lib/dom.js";
import { chance, known, NONE, percent, short, signed, whole, words } from "../lib/format.js";
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

/** Everything about one decision. @param {Host} host @param {number} t */
export function decisionDetail(host, t) {
  const own = host.decisions[t];
  if (!own) return h("p", { class: "soft" }, "No decision was taken here.");
  const names = termNames([host]);
  const heads = Object.entries(own.probabilities ?? {}).filter(([, p]) => known(p)).sort(([a], [b]) => headRank(a) - headRank(b));
  return h(
    "div",
    { class: "decision" },
    h("h3", {}, `Decision ${whole(own.decision)} `, opMark(own.op), h("span", { class: "action" }, actionText(own))),
    h("div", { class: "decision-parts" }, [
      h("div", {}, h("h4", {}, "Probability"), probabilities(heads, jointProbability(own))),
      h("div", {}, [
        h("h4", {}, "Legal operations"),
        legal(own),
        h("h4", {}, "Host"),
        h("p", { class: "pairs" }, pair("value", signed(own.value, 3)), pair("accuracy", percent(own.val_accuracy, 1)), pair("loss", short(own.val_loss))),
      ]),
      h("div", {}, [
        h("h4", {}, "Reward ", h("b", {}, signed(own.reward, 3))),
        rewardBar(own.reward_terms ?? {}, names, barSize(own.reward_terms) || 1),
        rewardNumbers(own.reward_terms ?? {}, names),
      ]),
    ]),
  );
}

/** @param {Host} host @param {number} selected @param {(t: number) => void} pick */
export function decisionTable(host, selected, pick) {
  const names = termNames([host]);
  const top = Math.max(1e-9, ...host.decisions.map((own) => barSize(own.reward_terms)));
  const from = Math.max(0, Math.min(selected - ROWS / 2, host.decisions.length - ROWS));
  const shown = host.decisions.slice(from, from + ROWS);
  const rows = shown.map((own, i) => ({ own, t: from + i })).map(({ own, t }) =>
    h(
      "tr",
      { "data-selected": t === selected ? "" : null, onclick: () => pick(t) },
      h("td", { class: "number" }, h("button", { type: "button", class: "plain", "data-key": `decision-${t}`, "aria-pressed": t === selected ? "true" : "false", "aria-label": `Decision ${own.decision}` }, whole(own.decision))),
      h("td", {}, opMark(own.op), h("span", { class: "action" }, actionText(own))),
      h("td", { class: "number" }, chance(jointProbability(own))),
      h("td", { class: "number roomy" }, whole(own.legal_ops?.length)),
      h("td", { class: "number roomy" }, percent(own.val_accuracy, 1)),
      h("td", { class: "number" }, signed(own.reward, 2)),
      h("td", { class: "bar-cell" }, rewardBar(own.reward_terms ?? {}, names, top)),
    ),
  );
  const part = shown.length < host.decisions.length ? h("p", { class: "soft" }, `${whole(shown.length)} of ${whole(host.decisions.length)} decisions, around the selected one`) : null;
  const heads = [["#", "number"], ["Action", ""], ["Prob.", "number"], ["Legal", "number roomy"], ["Accuracy", "number roomy"], ["Reward", "number"], ["Made of", "bar-cell"]];
  return h(
    "div",
    { class: "wide tall", "data-scroll": "decisions", tabindex: 0, role: "group", "aria-label": `Decisions of host ${host.id}` },
    h(
      "table",
      { class: "decisions" },
      h("caption", { class: "hidden" }, `Decisions of host ${host.id}`),
      h("thead", {}, h("tr", {}, heads.map(([text, name]) => h("th", { scope: "col", class: name || null }, text)))),
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
  if (!heads.length) return h("p", { class: "soft" }, "Not recorded: a rule decided.");
  return h(
    "ul",
    { class: "probabilities" },
    heads.map(([head, p]) => h("li", {}, h("span", {}, words(head)), h("span", { class: "meter", "aria-hidden": "true", style: { "--share": String(p) } }), h("b", {}, chance(p)))),
    heads.length > 1 ? h("li", { class: "joint" }, h("span", {}, "all together"), h("span", {}), h("b", {}, chance(joint))) : null,
  );
}

/** @param {Decision} own */
function legal(own) {
  const ops = own.legal_ops ?? [];
  if (!ops.length) return h("p", { class: "soft" }, "Not recorded.");
  return h("ul", { class: "chips" }, ops.map((op) => h("li", { "data-chosen": op === own.op ? "" : null }, opMark(op), op === own.op ? " chosen" : "")));
}

/** @param {string} label @param {string} value */
const pair = (label, value) => h("span", {}, `${label} `, h("b", {}, value ?? NONE));
