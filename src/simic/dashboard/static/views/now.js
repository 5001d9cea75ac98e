/**
 * Now: how far the run is, how good, how fast and how healthy.
 */

import { runAddress } from "../lib/address.js";
import { h, replace, table } from "../lib/dom.js";
import { ago, bytes, duration, fixed, known, moment, NONE, plural, setting, short, signed, whole, words } from "../lib/format.js";
import { entryList, fact, lightList } from "../lib/run_facts.js";
import { seriesVariable } from "../lib/colours.js";
import { scoreStrip } from "../learning/score_strip.js";
import { statusPill } from "./runs.js";

const LAST_ENTRIES = 8;
const OWN_METRICS = 4;
/** In the order in which they happen. */
const PHASES = ["rollout", "statistics", "update", "record", "checkpoint"];
const SEVERITY_ORDER = { bad: 0, warn: 1, ok: 2, unknown: 3 };

/** @param {import("../app.js").Context} context @returns {import("../app.js").View} */
export function nowView({ store }) {
  const head = h("div", { class: "heading" });
  const facts = h("dl", { class: "facts" });
  const score = h("div", {});
  const lights = h("ul", { class: "lights" });
  const phases = h("div", {});
  const machine = h("dl", { class: "facts small-facts" });
  const story = h("div", {});
  const settings = h("div", {});
  const verdict = h("p", { class: "soft" });
  const scorePanel = h("section", { class: "panel", "aria-labelledby": "t-score" }, h("h2", { id: "t-score" }, "Score"), score);
  const healthPanel = h("section", { class: "panel span", "aria-labelledby": "t-health" }, h("h2", { id: "t-health" }, "Health"), verdict, lights);
  const element = h(
    "div",
    { class: "now" },
    head,
    facts,
    h("div", { class: "columns" }, [
      scorePanel,
      h("section", { class: "panel", "aria-labelledby": "t-phases" }, h("h2", { id: "t-phases" }, "Time of the last update"), phases, machine),
      h("section", { class: "panel", "aria-labelledby": "t-story" }, h("h2", { id: "t-story" }, "Latest"), story),
      healthPanel,
    ]),
    settings,
  );
  let shownSettings = "";

  function draw() {
    const now = store.now;
    replace(head, headline(now));
    replace(facts, factList(now, store.rows));
    scorePanel.hidden = now.kind === "growth";
    healthPanel.hidden = !now.lights?.length;
    replace(score, scoreStrip(now, store.rows));
    const order = [...(now.lights ?? [])].sort((a, b) => rank(a) - rank(b));
    verdict.textContent = health(order);
    replace(lights, lightList(order));
    replace(phases, phaseBar(now.phases ?? {}));
    replace(machine, machineFacts(now));
    const last = store.entries.slice(-LAST_ENTRIES).reverse();
    const more = h("p", {}, h("a", { href: runAddress(store.id, "story"), "data-key": "story" }, "The whole story"));
    replace(story, last.length ? entryList(store, last) : h("p", { class: "soft" }, "Nothing has happened yet."), more);
    const text = JSON.stringify([now.config, now.command, now.versions]);
    if (text !== shownSettings) replace(settings, settingsOf(now));
    shownSettings = text;
  }

  const timer = setInterval(() => store.now && replace(facts, factList(store.now, store.rows)), 1000);
  return { element, update: draw, destroy: () => clearInterval(timer) };
}

/** @param {any} now */
function headline(now) {
  const kind = [now.task, now.algorithm, now.preset ? `preset ${now.preset}` : null].filter(Boolean).join(" · ");
  const reason = now.reason ? h("p", { class: "reason" }, now.reason) : null;
  return [h("h1", {}, now.name), statusPill(now.status), h("p", { class: "soft" }, kind), reason];
}

/** @param {any} now @param {import("../lib/run_store.js").Row[]} rows */
function factList(now, rows) {
  const done = known(now.update) ? now.update : 0;
  const total = known(now.updates) && now.updates > 0 && done <= now.updates;
  const bar = total ? h("progress", { max: now.updates, value: Math.min(done, now.updates), "aria-label": "Updates done" }) : null;
  const running = now.status === "running";
  const own = now.kind === "growth";
  const end = running ? Date.now() / 1000 : now.last_event;
  const took = known(now.started) && known(end) ? end - now.started : null;
  return [
    fact(own ? "Decisions" : "Updates", [whole(now.update), total ? h("span", { class: "soft" }, ` of ${whole(now.updates)}`) : null], bar),
    own ? ownFacts(rows) : now.kind !== "training" ? lossFact(rows) : [fact("Score", fixed(now.score, 2), "points, mean of hosts"), fact("Over twins", signed(now.gain, 2), "hosts that never grow")],
    running ? fact("Time left", duration(now.eta_seconds), "estimate") : fact("Took", duration(took), `ended ${ago(now.last_event)}`),
    fact("Speed", known(now.decisions_per_second) ? [short(now.decisions_per_second), h("span", { class: "soft" }, " / s")] : NONE, "decisions of all hosts"),
    running ? fact("Running", duration(took), `since ${moment(now.started)}`) : fact("Started", moment(now.started), ago(now.started)),
    running ? fact("Last event", ago(now.last_event), moment(now.last_event)) : null,
  ];
}

/** The newest metrics of a user's own training. @param {import("../lib/run_store.js").Row[]} rows */
function ownFacts(rows) {
  const metrics = Object.entries(rows[rows.length - 1]?.metrics ?? {}).filter(([, value]) => known(value));
  return metrics.slice(0, OWN_METRICS).map(([name, value]) => fact(words(name), short(value), "newest"));
}

/** What a run that learns from recorded episodes goes by. @param {import("../lib/run_store.js").Row[]} rows */
function lossFact(rows) {
  const metrics = rows[rows.length - 1]?.metrics ?? {};
  return fact("Loss", short(metrics.loss ?? metrics.q_loss), "newest");
}

/** @param {string} name */
const phaseRank = (name) => (PHASES.includes(name) ? PHASES.indexOf(name) : PHASES.length);

/** Phases of the last update as one bar and a list. @param {Record<string, number | null>} phases */
function phaseBar(phases) {
  const parts = Object.entries(phases).filter(([, seconds]) => known(seconds)).sort(([a], [b]) => phaseRank(a) - phaseRank(b));
  const sum = parts.reduce((total, [, seconds]) => total + /** @type {number} */ (seconds), 0);
  if (!sum) return h("p", { class: "soft" }, "No update is complete yet.");
  const style = (/** @type {number} */ i, /** @type {any} */ seconds) => ({ "--share": String(seconds / sum), "--colour": `var(${seriesVariable(i)})` });
  return [
    h("div", { class: "stack", "aria-hidden": "true" }, parts.map(([, seconds], i) => h("span", { style: style(i, seconds) }))),
    h("ul", { class: "legend" }, parts.map(([name, seconds], i) =>
      h("li", { style: style(i, seconds) }, h("span", { class: "swatch" }), words(name), " ", h("b", {}, duration(seconds)), h("span", { class: "soft" }, ` ${whole((100 * /** @type {number} */ (seconds)) / sum)} %`)),
    )),
  ];
}

/** @param {any} now */
function machineFacts(now) {
  const { workers, memory_mb: memory } = now;
  const nodes = workers?.nodes ?? 1;
  return [
    workers ? fact("Workers", whole(workers.count), workers.count === 0 ? "the main process trains" : nodes > 1 ? `on ${whole(nodes)} machines` : "on one machine") : null,
    workers?.lost ? fact("Lost", whole(workers.lost), "workers") : null,
    ...Object.entries(memory ?? {}).map(([who, amount]) => fact(`Memory, ${who}`, known(amount) ? bytes(/** @type {number} */ (amount) * 1e6) : NONE)),
    now.faults ? fact("Faults", whole(now.faults), "groups were run again") : null,
    now.damaged_lines ? fact("Damaged lines", whole(now.damaged_lines), "left out of the files of events") : null,
  ];
}

/** @param {any} light */
const rank = (light) => SEVERITY_ORDER[/** @type {keyof typeof SEVERITY_ORDER} */ (light.state)] ?? 3;

/** @param {any[]} lights */
function health(lights) {
  const bad = lights.filter((light) => light.state === "bad" || light.state === "warn");
  if (bad.length) return `Look at ${bad.map((light) => light.label).join(", ")}.`;
  const measured = lights.filter((light) => light.state === "ok").length;
  return measured ? `All ${plural(measured, "measured value")} are within their limits.` : "Nothing is measured yet.";
}

/** @param {any} now */
function settingsOf(now) {
  const rows = Object.entries(now.config ?? {}).map(([name, value]) => [h("code", {}, name), h("code", {}, setting(value))]);
  const command = Array.isArray(now.command) ? now.command.join(" ") : now.command;
  const versions = Object.entries(now.versions ?? {}).map(([name, version]) => `${name} ${version}`).join(", ");
  return h(
    "details",
    { class: "panel", "data-key": "settings" },
    h("summary", {}, "Settings, command and versions"),
    command ? h("pre", { tabindex: 0 }, command) : null,
    h("p", { class: "soft" }, [now.path, versions].filter(Boolean).join(" · ")),
    rows.length ? table({ caption: "Settings of the run", head: ["Setting", "Value"], rows }) : null,
  );
}
