/**
 * What several views say about a run: its status line, health lights and last entries.
 */

import { runAddress } from "./address.js";
import { LIGHTS, SEVERITIES } from "./colours.js";
import { h, prose } from "./dom.js";
import { known, moment, NONE, short, whole, words } from "./format.js";

/** One number with its name; `note` explains it. @param {string} label @param {any} value @param {any} [note] */
export function fact(label, value, note) {
  return h("div", { class: "fact" }, h("dt", {}, label), h("dd", {}, value, note ? h("small", {}, note) : null));
}

/**
 * Health lights: sign, name and value of each; those that mean the same, such as the entropies of heads, share the
 * sentence that says what they mean.
 * @param {any[]} lights
 */
export function lightList(lights) {
  const groups = [...Map.groupBy(lights, (light) => light.sentence).values()];
  return groups.map((group) => h("li", { class: "light" }, group.map(lightHead), h("p", { class: "light-text" }, meaning(group[0]))));
}

/** @param {any} light */
function meaning({ limit, sentence }) {
  const text = String(sentence ?? "").replaceAll("*", "").replace(/^./, (letter) => letter.toUpperCase());
  return [limit ? h("span", { class: "limit" }, `Healthy: ${limit}. `) : null, prose(text)];
}

/** @param {any} light */
function lightHead(light) {
  const { sign, label } = LIGHTS[/** @type {keyof typeof LIGHTS} */ (light.state)] ?? LIGHTS.unknown;
  return h(
    "p",
    { class: "light-head", "data-state": light.state },
    h("span", { class: "sign", "aria-hidden": "true" }, sign),
    h("strong", {}, words(light.label)),
    known(light.value) ? h("span", {}, short(light.value)) : null,
    h("span", { class: "state" }, label),
  );
}

/**
 * Where an entry of the story leads to. A user's own training is one host over all of its decisions.
 * @param {import("./run_store.js").RunStore} store @param {import("./run_store.js").Entry} entry
 */
export function entryTarget({ id, now }, entry) {
  if (entry.host && known(entry.update)) {
    const update = now.kind === "growth" ? null : entry.update;
    return runAddress(id, "growth", { update, host: entry.host, decision: entry.decision });
  }
  return ["anomaly", "update", "plateau"].includes(entry.kind) ? runAddress(id, "learning") : null;
}

/** @param {import("./run_store.js").Entry} entry */
export function severityMark(entry) {
  const { sign, label } = SEVERITIES[/** @type {keyof typeof SEVERITIES} */ (entry.severity)] ?? SEVERITIES.info;
  return h("span", { class: "severity", "data-severity": entry.severity }, h("span", { "aria-hidden": "true" }, sign), h("span", { class: "hidden" }, label));
}

/** A short list of entries, newest first. @param {import("./run_store.js").RunStore} store @param {import("./run_store.js").Entry[]} entries */
export function entryList(store, entries) {
  return h(
    "ol",
    { class: "entries" },
    entries.map((entry) => {
      const target = entryTarget(store, entry);
      const text = target ? h("a", { href: target }, entry.text) : h("span", {}, entry.text);
      const when = known(entry.time) ? moment(entry.time) : known(entry.update) ? `update ${whole(entry.update)}` : NONE;
      return h("li", {}, severityMark(entry), h("span", { class: "when" }, when), text);
    }),
  );
}
