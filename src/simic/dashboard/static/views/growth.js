/**
 * Growth: the garden of an update's hosts, and one host with its network and decisions.
 */

import { runAddress, wholeParameter } from "../lib/address.js";
import { askRun } from "../lib/api.js";
import { h, replace } from "../lib/dom.js";
import { fixed, known, metric, plural, short, whole } from "../lib/format.js";
import { decisionDetail, decisionTable } from "../growth/decisions.js";
import { drawGarden, gardenLegend } from "../growth/garden.js";
import { commonScale, lanesOf } from "../growth/lanes.js";
import { network, networkTable } from "../growth/network.js";

const PLAY_MILLISECONDS = 350;
const NOT_TRACED = "This host was not traced in this update: the first hosts of each group are, at level debug all.";

/** @typedef {import("../growth/host.js").Host} Host */

/** @param {import("../app.js").Context} context @returns {import("../app.js").View} */
export function growthView({ store, route: first, go }) {
  let route = first;
  let past = /** @type {any} */ (null);
  let playing = 0;
  /** What the garden shows: stepping through decisions leaves it as it is. @type {any[]} */
  let planted = [];
  const steps = h("div", { class: "tools" });
  const about = h("p", { class: "soft", role: "status" });
  const garden = h("div", { class: "garden" });
  const detail = h("section", { class: "detail", "aria-label": "Selected host", tabindex: -1 });
  const heading = h("div", { class: "heading" }, h("h1", {}, "Growth"), about, steps);
  const columns = h("div", { class: "growth-columns" }, garden, detail);
  const element = h("div", { class: "growth" }, heading, gardenLegend(), columns);

  const wanted = () => wholeParameter(route.query, "update");
  const shown = () => (wanted() === null || store.growth?.update === wanted() ? store.growth : past?.update === wanted() ? past : null);
  const selectedHost = (/** @type {Host[]} */ hosts) => route.query.get("host") === null ? hosts[0] : hosts.find((host) => host.id === route.query.get("host"));
  const address = (/** @type {Record<string, any>} */ query) => {
    const kept = { update: wanted(), host: route.query.get("host"), decision: wholeParameter(route.query, "decision") };
    return runAddress(store.id, "growth", { ...kept, ...query });
  };

  async function load() {
    const update = wanted();
    if (update === null || shown() || !store.now) return;
    try {
      const answer = await askRun(store.id, "hosts", { update });
      past = { hosts: [], ...answer, update };
    } catch (error) {
      about.textContent = /** @type {Error} */ (error).message;
      return;
    }
    if (wanted() === update) draw();
  }

  function draw() {
    const growth = shown();
    drawSteps(growth);
    const hosts = /** @type {Host[]} */ (growth?.hosts ?? []);
    about.textContent = growth ? summary(growth, hosts) : wanted() === null ? "" : "Loading…";
    columns.classList.toggle("single", hosts.length === 1);
    if (!hosts.length) {
      planted = [];
      replace(garden, h("p", { class: "notice" }, growth || wanted() === null ? nothing(store.now, wanted()) : "Loading…"));
      replace(detail);
      return;
    }
    const host = selectedHost(hosts);
    const scene = [growth, host?.id, wanted()];
    if (scene.some((own, i) => own !== planted[i])) drawGarden(garden, hosts, host?.id ?? "", (own) => address({ host: own.id, decision: null }));
    planted = scene;
    if (host) drawDetail(host, hosts);
    else replace(detail, h("h2", {}, `Host ${route.query.get("host")}`), h("p", {}, NOT_TRACED));
  }

  /** @param {Host} host @param {Host[]} hosts */
  function drawDetail(host, hosts) {
    const last = host.decisions.length - 1;
    const at = host.decisions.findIndex((own) => own.decision === wholeParameter(route.query, "decision"));
    const t = at >= 0 ? at : last;
    const pick = (/** @type {number} */ next) => go(address({ host: host.id, decision: host.decisions[next]?.decision }), { replace: true });
    const range = h("input", { type: "range", min: 0, max: last, value: t, "data-key": "scrub", "aria-label": "Decision", oninput: () => pick(Number(range.value)) });
    range.value = String(t);
    const start = () => (playing ? stop() : play(host, t >= last ? 0 : t));
    const button = h("button", { type: "button", "data-key": "play", onclick: start }, playing ? "Pause" : "Play");
    const grown = known(host.parameters) && known(host.host_parameters) ? `, ${short(host.host_parameters)} → ${short(host.parameters)} parameters` : "";
    replace(
      detail,
      h("h2", {}, `Host ${host.id} `, h("span", { class: "soft" }, host.task)),
      h("p", { class: "soft" }, `${known(host.score) ? `Score ${fixed(host.score, 2)}, ` : ""}metric ${metric(host.metric)}${grown}${host.rolled_back ? "; rolled back" : ""}`),
      network(host, t, detail.clientWidth - 34),
      h("div", { class: "scrub" }, button, range, h("output", {}, `after decision ${whole(host.decisions[t]?.decision)} of ${whole(host.decisions.length)}`)),
      lanesOf(host, commonScale(hosts), { selected: t, pick }),
      h("details", { "data-key": "slots" }, h("summary", {}, "Slots as a table"), networkTable(host, t)),
      decisionDetail(host, t),
      h("h3", {}, "All decisions"),
      decisionTable(host, t, pick),
      h("p", {}, h("a", { href: runAddress(store.id, "story", { host: host.id }), "data-key": "host-story" }, `The story of host ${host.id}`)),
    );
  }

  /** Step through the decisions of a host. @param {Host} host @param {number} t */
  function play(host, t) {
    go(address({ host: host.id, decision: host.decisions[t].decision }), { replace: true });
    clearTimeout(playing);
    playing = t + 1 < host.decisions.length ? setTimeout(() => play(host, t + 1), PLAY_MILLISECONDS) : 0;
    draw();
  }

  function stop() {
    clearTimeout(playing);
    playing = 0;
    draw();
  }

  /** @param {any} growth */
  function drawSteps(growth) {
    const newest = store.growth?.update;
    const update = growth?.update ?? wanted();
    if (!known(newest) || !known(update) || store.now.kind === "growth") return replace(steps);
    const link = (/** @type {string} */ text, /** @type {number} */ target, /** @type {string} */ label) =>
      target < 0 || target > newest
        ? h("span", { class: "step off", "aria-hidden": "true" }, text)
        : h("a", { class: "step", "data-key": label, "aria-label": label, href: address({ update: target, decision: null }) }, text);
    const live = wanted() === null;
    replace(
      steps,
      link("◀", update - 1, "Update before"),
      h("span", {}, "Update ", h("b", {}, whole(update)), h("span", { class: "soft" }, ` of ${whole(newest)}`)),
      link("▶", update + 1, "Update after"),
      live ? h("span", { class: "soft" }, "newest, follows the run") : h("a", { href: address({ update: null, decision: null }), "data-key": "follow" }, "Follow the newest"),
    );
  }

  let width = 0;
  const observer = new ResizeObserver(() => {
    if (detail.clientWidth && width && detail.clientWidth !== width) draw();
    width = detail.clientWidth;
  });
  observer.observe(detail);

  return {
    element,
    update: (change) => {
      if (change.reset) past = null;
      if (change.growth && (wanted() === null || shown()) && !playing) draw();
      else if (change.growth) drawSteps(shown());
      else if (change.reset) draw();
      load();
    },
    reroute: (next) => {
      const other = next.query.get("host") !== route.query.get("host") && !matchMedia("(min-width: 70rem)").matches;
      route = next;
      draw();
      load();
      if (other && !playing) detail.scrollIntoView({ block: "start" });
    },
    destroy: () => {
      clearTimeout(playing);
      observer.disconnect();
    },
  };
}

/** @param {any} growth @param {Host[]} hosts */
function summary(growth, hosts) {
  if (hosts.length === 1) return plural(hosts[0].decisions.length, "decision");
  const groups = new Set(hosts.map((host) => host.group)).size;
  const many = groups > 1 ? ` in ${plural(groups, "group")}` : "";
  return hosts.length ? `${plural(hosts.length, "traced host")}${many} of update ${whole(growth.update)}` : "";
}

/** @param {any} now @param {number | null} update */
function nothing(now, update) {
  if (["imitation", "iql"].includes(now?.kind)) return "This run learns from recorded episodes: no host grows in it.";
  if (update !== null) return `No host was traced in update ${whole(update)}.`;
  const waits = now?.status === "running" ? "The hosts of the first update are still training" : "No host was traced";
  return `${waits}; traces are recorded from level normal on.`;
}
