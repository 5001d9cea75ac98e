/**
 * Story: the log of events, newest first, filtered by kind, host and severity; entries lead to the other views.
 */

import { runAddress } from "../lib/address.js";
import { askRun } from "../lib/api.js";
import { SEVERITIES } from "../lib/colours.js";
import { h, replace } from "../lib/dom.js";
import { known, moment, NONE, plural, whole, words } from "../lib/format.js";
import { entryTarget, severityMark } from "../lib/run_facts.js";

const PAGE = 200;
/** Of one answer of the server. */
const MOST = 2000;
const FILTERS = ["kind", "host", "severity"];
/** The least severe first; a choice shows itself and all that is worse. */
const ORDER = Object.keys(SEVERITIES);

/** @typedef {import("../lib/run_store.js").Entry} Entry */

/** @param {import("../app.js").Context} context @returns {import("../app.js").View} */
export function storyView({ store, route: first, go }) {
  let route = first;
  let limit = PAGE;
  /** Entries older than those of the store, of the present filter. @type {Entry[]} */
  let past = [];
  /** Nothing older that passes the filter is left on the server. */
  let exhausted = false;
  const about = h("p", { class: "soft", role: "status" });
  const selects = Object.fromEntries(FILTERS.map((name) => [name, h("select", { id: `f-${name}`, onchange: change })]));
  const clear = h("button", { type: "button", class: "quiet", onclick: () => go(runAddress(store.id, "story")) }, "Clear");
  const labelled = FILTERS.map((name) => [h("label", { for: `f-${name}` }, name === "severity" ? "Severity from" : words(name).replace(/^./, (c) => c.toUpperCase())), selects[name]]);
  const list = h("div", {});
  const older = h("button", { type: "button", onclick: loadOlder }, "Show older entries");
  const tools = h("div", { class: "tools" }, labelled, clear);
  const element = h("div", { class: "story" }, h("div", { class: "heading" }, h("h1", {}, "Story"), about, tools), list, h("p", {}, older));

  const chosen = () => Object.fromEntries(FILTERS.map((name) => [name, route.query.get(name) ?? ""]));

  function change() {
    go(runAddress(store.id, "story", Object.fromEntries(FILTERS.map((name) => [name, selects[name].value]))));
  }

  function draw() {
    const filter = chosen();
    options(selects.kind, "all kinds", store.entries.map((entry) => entry.kind), filter.kind);
    options(selects.host, "all hosts", store.entries.map((entry) => entry.host), filter.host);
    options(selects.severity, "info", ORDER.slice(1), filter.severity, false);
    clear.hidden = !FILTERS.some((name) => filter[name]);
    const passing = [...past, ...store.entries.filter((entry) => passes(entry, filter))];
    const shown = passing.slice(-limit).reverse();
    const held = store.entries.length < store.total && !exhausted ? ` of the latest ${whole(store.entries.length)}` : "";
    const total = plural(store.total, "entry", "entries");
    about.textContent = clear.hidden ? total : `${whole(passing.length)}${held} pass the filter; ${total} in all`;
    replace(list, shown.length ? logTable(shown) : h("p", { class: "notice" }, store.total ? "No entry passes the filter." : "Nothing has happened yet."));
    older.hidden = passing.length <= limit && (exhausted || store.entries.length >= store.total);
  }

  /** @param {Entry[]} shown */
  function logTable(shown) {
    const head = [["Time", ""], ["Update", "number"], ["Decision", "number roomy"], ["Kind", ""], ["Host", ""], ["What happened", ""]];
    return h(
      "table",
      { class: "list log" },
      h("caption", { class: "hidden" }, "Events, newest first"),
      h("thead", {}, h("tr", {}, head.map(([text, name]) => h("th", { scope: "col", class: name || null }, text)))),
      h("tbody", {}, shown.map((entry) => line(entry))),
    );
  }

  /** @param {Entry} entry */
  function line(entry) {
    const target = entryTarget(store, entry);
    const text = target ? h("a", { href: target, "data-key": `entry-${entry.index}` }, entry.text) : entry.text;
    const host = entry.host ? h("a", { href: runAddress(store.id, "story", { ...chosen(), host: entry.host }), "data-key": `host-${entry.index}` }, entry.host) : "";
    return h(
      "tr",
      { "data-severity": entry.severity },
      h("td", { class: "when" }, known(entry.time) ? moment(entry.time) : NONE),
      h("td", { class: "number" }, whole(entry.update)),
      h("td", { class: "number roomy" }, known(entry.decision) ? whole(entry.decision) : ""),
      h("td", {}, severityMark(entry), ` ${words(entry.kind)}`),
      h("td", {}, host),
      h("td", { class: "what" }, text),
    );
  }

  async function loadOlder() {
    const filter = chosen();
    const asked = route;
    limit *= 2;
    const held = store.entries.filter((entry) => passes(entry, filter)).length + past.length;
    if (held >= limit || store.entries.length >= store.total) return draw();
    const severities = filter.severity ? ORDER.slice(ORDER.indexOf(filter.severity)) : [""];
    const before = (past[0] ?? store.entries[0])?.index;
    const amount = Math.min(MOST, limit - held);
    try {
      const answers = await Promise.all(severities.map((severity) => askRun(store.id, "events", { ...filter, severity, before, limit: amount })));
      if (asked !== route) return;
      const found = answers.flatMap((answer) => answer.entries).sort((a, b) => a.index - b.index);
      exhausted = found.length < amount;
      past = [...found.slice(-amount), ...past];
      draw();
    } catch (error) {
      about.textContent = /** @type {Error} */ (error).message;
    }
  }

  return {
    element,
    update: (changed) => {
      if (changed.reset) past = [];
      if (changed.story || changed.reset) draw();
    },
    reroute: (next) => {
      route = next;
      limit = PAGE;
      exhausted = false;
      past = [];
      draw();
    },
  };
}

/** @param {Entry} entry @param {Record<string, string>} filter */
function passes(entry, { kind, host, severity }) {
  return (!kind || entry.kind === kind) && (!host || entry.host === host) && ORDER.indexOf(entry.severity) >= ORDER.indexOf(severity || "info");
}

/** Fill a filter with what there is; what the address asks for stays, even if nothing has it.
 * @param {HTMLSelectElement} select @param {string} none @param {(string | null)[]} values @param {string} chosen */
function options(select, none, values, chosen, sorted = true) {
  const names = [...new Set([...values.filter(Boolean), ...(chosen ? [chosen] : [])])];
  if (sorted) names.sort((a, b) => String(a).localeCompare(String(b), "en", { numeric: true }));
  const text = JSON.stringify(names);
  if (select.dataset.names !== text) {
    select.dataset.names = text;
    select.replaceChildren(h("option", { value: "" }, none), ...names.map((name) => h("option", { value: name }, words(String(name)))));
  }
  select.value = chosen;
}
