/**
 * Lanes: one strip per slot, time from left to right, one column per decision; below them the rewards.
 *
 * Positions are percentages, so that lanes fit any width while letters keep their size.
 */

import { stageClass, stageOf } from "../lib/colours.js";
import { h, s } from "../lib/dom.js";
import { fixed, known, signed, signedShort, whole } from "../lib/format.js";
import { magnitude, spansOf, stateAfter } from "./host.js";

/** @typedef {import("./host.js").Host} Host */
/** @typedef {import("./host.js").Slot} Slot */
/** @typedef {{reward: number, contribution: number}} Scale common to all hosts, so that they can be compared */

/** Height of a slot's lane in pixels: letters above, contribution below. */
const HEIGHT = 24;

/** @param {Host[]} hosts @returns {Scale} */
export function commonScale(hosts) {
  return {
    reward: magnitude(hosts.flatMap((host) => host.decisions.map((own) => own.reward))),
    contribution: magnitude(hosts.flatMap((host) => host.slots.flatMap((slot) => slot.contribution ?? []))),
  };
}

/**
 * All lanes of a host, with a line at the selected decision.
 * @param {Host} host @param {Scale} scale @param {{selected?: number | null, pick?: (t: number) => void}} [options]
 */
export function lanesOf(host, scale, { selected = null, pick } = {}) {
  const choose = (/** @type {MouseEvent} */ event) => {
    const lane = /** @type {Element} */ (event.target).closest(".lane");
    if (!lane || !pick) return;
    const box = lane.getBoundingClientRect();
    const t = Math.floor((host.decisions.length * (event.clientX - box.left)) / box.width);
    pick(Math.max(0, Math.min(host.decisions.length - 1, t)));
  };
  return h(
    "div",
    { class: "lanes", onclick: pick ? choose : null },
    host.slots.map((slot) => [
      h("span", { class: "lane-name", title: slot.name }, slot.name),
      slotLane(host, slot, scale, selected),
      h("span", { class: "lane-value" }, contribution(host, slot, selected)),
    ]),
    host.decisions.some((own) => known(own.reward)) ? rewards(host, scale, selected) : null,
  );
}

/** @param {Host} host @param {Scale} scale @param {number | null} selected */
function rewards(host, scale, selected) {
  const value = selected === null ? "" : signed(host.decisions[selected]?.reward, 2);
  return [h("span", { class: "lane-name soft" }, "reward"), rewardLane(host, scale, selected), h("span", { class: "lane-value soft" }, value)];
}

/** @param {Host} host @param {Slot} slot @param {number | null} selected */
function contribution(host, slot, selected) {
  const { contribution: value } = stateAfter(host, slot, selected ?? host.decisions.length - 1);
  return known(value) ? signedShort(value) : "";
}

/** @param {Host} host @param {Slot} slot @param {Scale} scale @param {number | null} selected */
function slotLane(host, slot, scale, selected) {
  const length = host.decisions.length;
  const at = (/** @type {number} */ t) => `${(100 * t) / Math.max(1, length)}%`;
  const spans = spansOf(host, slot);
  const drawn = spans.map(({ stage, blueprint, start, end, alpha }) =>
    s(
      "svg",
      { x: at(start), width: at(end - start), height: "100%", class: stageClass(stage) },
      s("rect", { width: "100%", height: "100%", class: "tint" }),
      s(
        "svg",
        { viewBox: `0 0 ${alpha.length} 1`, preserveAspectRatio: "none", width: "100%", height: "100%" },
        s("path", { class: "alpha", d: steps(alpha) }),
      ),
      s("rect", { width: "1", height: "100%", class: "edge" }),
      spanLabel(stage, end - start > 1 ? blueprint : ""),
    ),
  );
  const label = `${slot.name}: ${spans.map((span) => `${stageOf(span.stage).label} ${span.blueprint} from decision ${span.start}`).join(", ")}`;
  return s(
    "svg",
    { class: "lane", width: "100%", height: HEIGHT, role: "img", "aria-label": label },
    drawn,
    contributionLine(host, slot, scale.contribution),
    cursor(selected, length),
  );
}

/** The letter of a stage, and the blueprint where there is room. @param {string} stage @param {string} blueprint */
function spanLabel(stage, blueprint) {
  const letter = s("tspan", { class: "letter" }, stageOf(stage).letter);
  return s("text", { x: 2.5, y: 10 }, letter, blueprint && stage !== "dormant" ? ` ${blueprint}` : "");
}

/** Contribution over time, below the letters; the middle of its half is 0. @param {Host} host @param {Slot} slot @param {number} top */
function contributionLine(host, slot, top) {
  let path = "";
  let pen = false;
  for (let t = 0; t < host.decisions.length; t++) {
    const { contribution: value } = stateAfter(host, slot, t);
    if (!known(value)) pen = false;
    else {
      path += `${pen ? "L" : "M"}${t + 0.5} ${(1 - (0.9 * value) / top).toFixed(3)}`;
      pen = true;
    }
  }
  if (!path.includes("L")) return null;
  return s(
    "svg",
    { viewBox: `0 0 ${host.decisions.length} 2`, preserveAspectRatio: "none", width: "100%", height: HEIGHT / 2, y: HEIGHT / 2 },
    s("path", { class: "contribution", d: path }),
  );
}

/** @param {Host} host @param {Scale} scale @param {number | null} selected */
function rewardLane(host, scale, selected) {
  const length = host.decisions.length;
  const bars = (/** @type {1 | -1} */ sign) =>
    host.decisions
      .map(({ reward }, t) => {
        if (!known(reward) || Math.sign(reward) !== sign) return "";
        return `M${t + 0.12} 1h.76v${((-0.95 * reward) / scale.reward).toFixed(3)}h-.76Z`;
      })
      .join("");
  const sum = host.decisions.reduce((total, own) => total + (own.reward ?? 0), 0);
  return s(
    "svg",
    { class: "lane rewards", width: "100%", height: 22, role: "img", "aria-label": `Rewards of ${whole(length)} decisions, sum ${fixed(sum, 2)}` },
    s(
      "svg",
      { viewBox: `0 0 ${Math.max(1, length)} 2`, preserveAspectRatio: "none", width: "100%", height: "100%" },
      s("path", { class: "gain-bar", d: bars(1) }),
      s("path", { class: "loss-bar", d: bars(-1) }),
    ),
    s("line", { class: "zero", x1: 0, x2: "100%", y1: "50%", y2: "50%" }),
    cursor(selected, length),
  );
}

/** @param {number | null} selected @param {number} length */
function cursor(selected, length) {
  if (selected === null || !length) return null;
  return s("rect", { class: "cursor", x: `${(100 * selected) / length}%`, width: `${100 / length}%`, height: "100%" });
}

/** The area under steps of unit width in a box of height 1. @param {number[]} values */
function steps(values) {
  return `M0 1${values.map((value, i) => `V${(1 - value).toFixed(3)}H${i + 1}`).join("")}V1Z`;
}
