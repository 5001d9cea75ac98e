/**
 * All runs and evaluations of the watched directory, asked for every few seconds.
 */

import { evaluationAddress, listText, runAddress } from "../lib/address.js";
import { ask } from "../lib/api.js";
import { STATUS_SIGNS } from "../lib/colours.js";
import { h, replace } from "../lib/dom.js";
import { ago, bytes, fixed, known, moment, NONE, plural, whole } from "../lib/format.js";

const SECONDS = 3;

/** @typedef {{key: string, label: string, value: (run: any) => any, cell: (run: any) => any, number?: boolean}} Column */
/** @type {Column[]} */
const COLUMNS = [
  { key: "name", label: "Run", value: (run) => run.id, cell: nameCell },
  { key: "status", label: "Status", value: (run) => run.status, cell: (run) => statusPill(run.status) },
  { key: "task", label: "Task", value: (run) => run.task ?? "", cell: (run) => run.task ?? NONE },
  { key: "preset", label: "Preset", value: (run) => run.preset ?? "", cell: (run) => run.preset ?? NONE },
  { key: "progress", label: "Updates", value: progress, cell: progressCell, number: true },
  { key: "score", label: "Score", value: (run) => run.score ?? -Infinity, cell: (run) => fixed(run.score, 2), number: true },
  { key: "age", label: "Last event", value: (run) => run.last_event ?? run.started ?? 0, cell: ageCell, number: true },
  { key: "bytes", label: "Size", value: (run) => run.bytes ?? 0, cell: (run) => bytes(run.bytes), number: true },
];

/** @param {import("../app.js").Context} context @returns {import("../app.js").View} */
export function runsView({ go, connected }) {
  let data = /** @type {any} */ (null);
  let sort = { key: "age", down: true };
  let words = "";
  let failures = 0;
  const chosen = new Set();
  let timer = 0;
  let gone = false;
  const about = h("p", { class: "soft", role: "status" }, "Loading…");
  const runs = h("div", {});
  const evaluations = h("section", { "aria-labelledby": "evaluations", hidden: true });
  const compare = h("button", { type: "button", disabled: true, onclick: () => go(compareAddress([...chosen])) }, "Compare");
  const filter = h("input", { type: "search", id: "filter", autocomplete: "off", placeholder: "name, task, status…" });
  filter.addEventListener("input", () => {
    words = filter.value.toLowerCase();
    draw();
  });
  const tools = h("div", { class: "tools" }, h("label", { for: "filter" }, "Filter"), filter, compare);
  const element = h("div", {}, h("div", { class: "heading" }, h("h1", {}, "Runs"), about, tools), runs, evaluations);

  async function load() {
    try {
      data = await ask("runs");
      failures = 0;
      connected({ state: "live", text: "Live" });
    } catch (error) {
      const { message, status } = /** @type {import("../lib/api.js").ApiError} */ (error);
      failures++;
      const refused = status >= 400 && status < 500;
      if (!gone) connected(refused ? { state: "refused", text: message } : { state: "retrying", text: "Disconnected, retrying" });
    }
    if (gone) return;
    if (data && !failures) draw();
    timer = setTimeout(load, 1000 * SECONDS);
  }

  function draw() {
    if (!data) return;
    const all = data.runs ?? [];
    const shown = all.filter((/** @type {any} */ run) => matches(run, words));
    const column = COLUMNS.find((own) => own.key === sort.key) ?? COLUMNS[0];
    shown.sort((/** @type {any} */ a, /** @type {any} */ b) => order(column.value(a), column.value(b)) * (sort.down ? -1 : 1));
    const running = all.filter((/** @type {any} */ run) => run.status === "running").length;
    const hidden = all.length - shown.length;
    about.textContent = `${plural(all.length, "run")} in ${data.directory}, ${whole(running)} running${hidden ? `; ${whole(hidden)} filtered out` : ""}`;
    replace(runs, shown.length ? table(shown) : empty(all.length));
    compare.disabled = chosen.size < 2;
    compare.textContent = chosen.size < 2 ? "Compare (choose two or more)" : `Compare ${chosen.size} runs`;
    const list = data.evaluations ?? [];
    evaluations.hidden = !list.length;
    if (list.length) replace(evaluations, h("h2", { id: "evaluations" }, "Evaluations"), evaluationTable(list));
  }

  /** @param {any[]} shown */
  function table(shown) {
    const head = COLUMNS.map(({ key, label, number }) => {
      const direction = sort.key === key ? (sort.down ? "descending" : "ascending") : null;
      const change = () => {
        sort = { key, down: sort.key === key ? !sort.down : Boolean(number) };
        draw();
      };
      const arrow = direction ? h("span", { "aria-hidden": "true" }, sort.down ? " ▾" : " ▴") : null;
      const button = h("button", { type: "button", class: "plain", "data-key": `sort-${key}`, onclick: change }, label, arrow);
      return h("th", { scope: "col", "aria-sort": direction, class: number ? "number" : null }, button);
    });
    const rows = shown.map((run) => {
      const mark = (/** @type {Event} */ event) => {
        if (/** @type {HTMLInputElement} */ (event.target).checked) chosen.add(run.id);
        else chosen.delete(run.id);
        draw();
      };
      const box = h("input", { type: "checkbox", "aria-label": `Compare ${run.id}`, "data-key": `c-${run.id}`, onchange: mark });
      box.checked = chosen.has(run.id);
      const cells = COLUMNS.map(({ cell, label, number, key }) =>
        h("td", { class: [number ? "number" : "", `cell-${key}`].join(" "), "data-label": label }, cell(run)),
      );
      return h("tr", {}, h("td", { class: "cell-box" }, box), cells);
    });
    return h(
      "table",
      { class: "list runs" },
      h("caption", { class: "hidden" }, "Runs; the headings sort them"),
      h("thead", {}, h("tr", {}, h("td", {}), head)),
      h("tbody", {}, rows),
    );
  }

  load();
  return {
    element,
    destroy: () => {
      gone = true;
      clearTimeout(timer);
    },
  };
}

/** A status with its sign. @param {string} status */
export function statusPill(status) {
  const sign = STATUS_SIGNS[/** @type {keyof typeof STATUS_SIGNS} */ (status)] ?? "·";
  return h("span", { class: "pill", "data-status": status }, h("span", { "aria-hidden": "true" }, sign), ` ${status}`);
}

/** @param {any} run */
function nameCell(run) {
  const kind = run.algorithm && run.algorithm !== "ppo" ? run.algorithm : run.kind && run.kind !== "training" ? run.kind : "";
  const faults = run.faults ? h("span", { class: "bad small" }, ` ▲ ${plural(run.faults, "fault")}`) : null;
  const link = h("a", { href: runAddress(run.id, "now"), "data-key": `run-${run.id}` }, run.id);
  return [link, kind ? h("span", { class: "soft small" }, ` ${kind}`) : null, faults];
}

/** @param {any} run */
function progressCell(run) {
  if (!known(run.update)) return NONE;
  if (!known(run.updates) || run.updates < run.update || run.updates <= 0) return whole(run.update);
  const bar = h("progress", { max: run.updates, value: Math.min(run.update, run.updates), "aria-label": `Updates of ${run.id}` });
  return [bar, h("span", { class: "amount" }, `${whole(run.update)} / ${whole(run.updates)}`)];
}

/** @param {any} run */
function progress(run) {
  return known(run.update) ? run.update / (run.updates || run.update || 1) : -1;
}

/** @param {any} run */
function ageCell(run) {
  const unix = run.last_event ?? run.started;
  return known(unix) ? h("time", { datetime: new Date(unix * 1000).toISOString(), title: moment(unix) }, ago(unix)) : NONE;
}

/** @param {any[]} list */
function evaluationTable(list) {
  const rows = list.map((own) =>
    h(
      "tr",
      {},
      h("td", { class: "cell-name" }, h("a", { href: evaluationAddress(own.id), "data-key": `evaluation-${own.id}` }, own.id)),
      h("td", { "data-label": "Best first" }, (own.controllers ?? []).join(", ") || NONE),
      h("td", { class: "number", "data-label": "Tasks" }, whole(own.tasks)),
      h("td", { class: "number", "data-label": "Hosts" }, whole(own.hosts)),
      h("td", { class: "number", "data-label": "Age" }, ago(own.modified)),
      h("td", { class: "number", "data-label": "Size" }, bytes(own.bytes)),
    ),
  );
  const head = ["Evaluation", "Best first", "Tasks", "Hosts", "Age", "Size"];
  const cells = head.map((label, i) => h("th", { scope: "col", class: i > 1 ? "number" : null }, label));
  return h("table", { class: "list" }, h("thead", {}, h("tr", {}, cells)), h("tbody", {}, rows));
}

/** @param {number} all */
function empty(all) {
  if (all) return h("p", { class: "notice" }, "No run matches the filter.");
  return h("p", { class: "notice" }, "There is no run yet. ", h("code", {}, "simic train"), " starts one; it appears here by itself.");
}

/** @param {any} run @param {string} words */
function matches(run, words) {
  const text = [run.id, run.task, run.status, run.preset, run.algorithm, run.kind].join(" ").toLowerCase();
  return words.split(/\s+/).every((word) => text.includes(word));
}

/** @param {any} a @param {any} b */
const order = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);

/** @param {string[]} ids */
const compareAddress = ([first, ...others]) => runAddress(first, "learning", { with: listText(others) });
