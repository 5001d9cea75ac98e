/**
 * Reads a traced host: what its slots were like after each decision.
 */

import { termOrder } from "../lib/colours.js";
import { known } from "../lib/format.js";

/** @typedef {{name: string, stage: string[], alpha: (number | null)[], contribution: (number | null)[],
 *   blueprint: string[], parameters: number | null}} Slot */
/** @typedef {{decision: number, action: string, op: string, slot: string | null, probabilities: Record<string, number | null>,
 *   legal_ops: string[], value: number | null, reward: number | null, reward_terms: Record<string, number | null>,
 *   val_accuracy?: number | null, val_loss?: number | null}} Decision */
/** @typedef {{id: string, group: number, env: number, task: string, score: number | null, metric: number | null,
 *   host_parameters: number | null, parameters: number | null, rolled_back: boolean, slots: Slot[],
 *   decisions: Decision[], segments: {name: string, parameters: number | null}[]}} Host */
/** @typedef {{stage: string, blueprint: string, alpha: number, contribution: number | null}} SlotState */
/** @typedef {{stage: string, blueprint: string, start: number, end: number, alpha: number[]}} Span */

/**
 * A slot after decision number `t` (a position, from 0). States are one more than decisions: the first is before any.
 * @param {Host} host @param {Slot} slot @param {number} t
 * @returns {SlotState}
 */
export function stateAfter(host, slot, t) {
  const i = Math.max(0, Math.min(slot.stage.length - 1, t + slot.stage.length - host.decisions.length));
  const alpha = slot.alpha?.[i];
  return {
    stage: slot.stage[i] ?? "dormant",
    blueprint: slot.blueprint?.[i] ?? "",
    alpha: known(alpha) ? Math.max(0, Math.min(1, alpha)) : 0,
    contribution: slot.contribution?.[i] ?? null,
  };
}

/**
 * The life of a slot as spans of one stage and blueprint; `end` is exclusive.
 * @param {Host} host @param {Slot} slot
 * @returns {Span[]}
 */
export function spansOf(host, slot) {
  /** @type {Span[]} */
  const spans = [];
  for (let t = 0; t < host.decisions.length; t++) {
    const { stage, blueprint, alpha } = stateAfter(host, slot, t);
    const last = spans[spans.length - 1];
    if (last && last.stage === stage && last.blueprint === blueprint) {
      last.end = t + 1;
      last.alpha.push(alpha);
    } else spans.push({ stage, blueprint, start: t, end: t + 1, alpha: [alpha] });
  }
  return spans;
}

/** The probability of a whole action: the product of its heads'. @param {Decision} decision */
export function jointProbability(decision) {
  const values = Object.values(decision.probabilities ?? {}).filter(known);
  return values.length ? values.reduce((product, p) => product * p, 1) : null;
}

/** The names of all reward terms of some hosts, in a fixed order. @param {Host[]} hosts @returns {string[]} */
export function termNames(hosts) {
  return termOrder(hosts.flatMap((host) => host.decisions.flatMap((own) => Object.keys(own.reward_terms ?? {}))));
}

/** The largest magnitude of some numbers; at least a tiny one. @param {(number | null | undefined)[]} values */
export const magnitude = (values) => values.reduce((/** @type {number} */ top, own) => (known(own) ? Math.max(top, Math.abs(own)) : top), 1e-9);

/** Sum of the rewards of an episode. @param {Host} host */
export const episodeReward = (host) => host.decisions.reduce((sum, own) => sum + (known(own.reward) ? own.reward : 0), 0);
