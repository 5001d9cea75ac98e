/**
 * Learning: curves over updates of one run, or of several overlaid.
 */

import { listParameter, runAddress } from "../lib/address.js";
import { ask } from "../lib/api.js";
import { Chart } from "../lib/charts.js";
import { h, replace } from "../lib/dom.js";
import { LiveRun } from "../lib/live.js";
import { plural, short, whole, words } from "../lib/format.js";
import { RunStore } from "../lib/run_store.js";
import { comparisonForm, comparisonPanel, MAX_OTHERS } from "../learning/comparison.js";
import { fatesFigure } from "../learning/fates.js";
import { metricNames, namedPanel, ownPanels, PANELS } from "../learning/panels.js";

const SHOWN_ANOMALIES = 30;

/** @param {import("../app.js").Context} context @returns {import("../app.js").View} */
export function learningView({ store, route: first, go }) {
  let route = first;
  let frame = 0;
  let all = /** @type {any[]} */ ([]);
  let toolsDrawn = "";
  /** @type {Map<string, LiveRun>} */
  const others = new Map();
  /** @type {Map<string, Chart>} */
  const charts = new Map();
  const about = h("p", { class: "soft", role: "status" });
  const tools = h("div", { class: "tools" });
  const compared = h("div", {});
  const anomalies = h("div", {});
  const grid = h("div", { class: "charts" });
  const multiples = h("div", { class: "charts multiples" });
  const fates = h("div", { class: "fates-box" });
  const heading = h("div", { class: "heading" }, h("h1", {}, "Learning"), about, tools);
  const element = h("div", { class: "learning" }, heading, compared, anomalies, grid, multiples);

  const stores = () => [store, ...[...others.values()].map((live) => live.store)];
  const schedule = () => (frame ||= requestAnimationFrame(draw));

  function draw() {
    frame = 0;
    if (!store.now) return;
    const runs = stores().map((own) => ({ id: own.id, name: own.id, rows: own.rows, anomalies: own.anomalies }));
    about.textContent = store.rows.length ? `${plural(store.rows.length, store.now.kind === "growth" ? "decision" : "update")} of ${store.now.name}` : "No update is complete yet.";
    replace(compared, comparisonPanel(stores()));
    replace(anomalies, anomalyList(store));
    drawTools(runs);
    drawCharts(runs);
    const many = runs.length > 1;
    replace(fates, runs.map((run) => fatesFigure(many ? run.name : "", run.rows)));
  }

  /** @param {import("../learning/panels.js").RunRows[]} runs */
  function drawCharts(runs) {
    const named = route.query.get("metric");
    const usual = store.now.kind === "growth" ? ownPanels(runs) : PANELS;
    const panels = named ? [namedPanel(named), ...usual] : usual;
    const shown = /** @type {Chart[]} */ ([]);
    for (const panel of panels) {
      for (const part of panel.each ? runs.map((run) => [run]) : [runs]) {
        const data = panel.make(part, runs);
        if (!data) continue;
        const key = panel.each ? `${panel.key} ${part[0].id}` : panel.key;
        if (shown.some((chart) => chart.key === key)) continue;
        const title = panel.each && runs.length > 1 ? `${data.title}, ${part[0].name}` : data.title;
        const chart = charts.get(key) ?? new Chart(key);
        charts.set(key, chart);
        shown.push(chart);
        const place = panel.each && runs.length > 1 ? multiples : grid;
        if (chart.element.parentNode !== place) place.append(chart.element);
        chart.update({ ...data, title });
      }
    }
    for (const [key, chart] of charts) {
      if (shown.includes(chart)) continue;
      chart.element.remove();
      chart.destroy();
      charts.delete(key);
    }
    const last = runs.length > 1 ? multiples : grid;
    multiples.style.setProperty("--runs", String(runs.length));
    for (const place of [grid, multiples]) {
      const order = [...shown.map((chart) => chart.element).filter((own) => own.parentNode === place), ...(place === last ? [fates] : [])];
      if (order.some((own, i) => place.children[i] !== own)) place.replaceChildren(...order);
    }
  }

  /** @param {import("../learning/panels.js").RunRows[]} runs */
  function drawTools(runs) {
    const chosen = route.query.get("metric") ?? "";
    const names = metricNames(runs);
    const signature = JSON.stringify([chosen, names, route.query.get("with"), all]);
    if (signature === toolsDrawn) return; // a menu that is open stays so
    toolsDrawn = signature;
    const select = h("select", { id: "metric", "data-key": "metric" }, h("option", { value: "" }, "none"), names.map((name) => h("option", { value: name }, name)));
    select.value = chosen;
    select.addEventListener("change", () => go(runAddress(store.id, "learning", { with: route.query.get("with"), metric: select.value })));
    const ids = listParameter(route.query, "with");
    replace(tools, h("label", { for: "metric" }, "Further metric"), select, comparisonForm(store.id, ids, all, go));
  }

  function follow() {
    const wanted = listParameter(route.query, "with").filter((id) => id !== store.id).slice(0, MAX_OTHERS);
    for (const [id, live] of others) {
      if (wanted.includes(id)) continue;
      live.stop();
      others.delete(id);
    }
    for (const id of wanted) {
      if (others.has(id)) continue;
      const refused = (/** @type {import("../lib/live.js").Connection} */ { state, text }) => state === "refused" && (about.textContent = text);
      const live = new LiveRun(new RunStore(id), schedule, refused, { stream: false });
      others.set(id, live);
      live.connect();
    }
    schedule();
  }

  ask("runs").then((answer) => {
    all = answer.runs ?? [];
    schedule();
  }, () => undefined);
  follow();
  return {
    element,
    update: (change) => (change.rows || change.reset) && schedule(),
    reroute: (next) => {
      route = next;
      follow();
    },
    repaint: () => charts.forEach((chart) => chart.build()),
    destroy: () => {
      cancelAnimationFrame(frame);
      others.forEach((live) => live.stop());
      charts.forEach((chart) => chart.destroy());
    },
  };
}

/** @param {RunStore} store */
function anomalyList(store) {
  const found = store.anomalies;
  if (!found.length) return null;
  const last = found.slice(-SHOWN_ANOMALIES).reverse();
  return h(
    "details",
    { class: "panel anomalies", "data-key": "anomalies" },
    h("summary", {}, h("span", { class: "bad", "aria-hidden": "true" }, "▼ "), `${plural(found.length, "anomaly", "anomalies")}, marked in the charts`),
    h("ul", {}, last.map((own) =>
      h("li", {}, h("a", { href: runAddress(store.id, "story", { kind: "anomaly" }) }, `update ${whole(own.update)}`), ` ${words(own.name)} ${own.where ?? ""}: ${short(own.value)}, limit ${short(own.threshold)}`),
    )),
  );
}
