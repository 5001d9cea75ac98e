/**
 * The frame of the page: reads the address, shows its view, and keeps the run's data while views of it change.
 */

import { parse, runAddress, VIEWS } from "./lib/address.js";
import { h, replace } from "./lib/dom.js";
import { LiveRun } from "./lib/live.js";
import { RunStore } from "./lib/run_store.js";
import { setUpTheme } from "./lib/theme.js";
import { evaluationView } from "./views/evaluation.js";
import { growthView } from "./views/growth.js";
import { learningView } from "./views/learning.js";
import { nowView } from "./views/now.js";
import { runsView } from "./views/runs.js";
import { storyView } from "./views/story.js";

/** @typedef {import("./lib/address.js").Route} Route */
/** @typedef {import("./lib/run_store.js").Change} Change */
/**
 * What a view gets.
 * @typedef {object} Context
 * @property {Route} route
 * @property {RunStore} store of the run; an empty one where there is none
 * @property {(address: string, options?: {replace?: boolean}) => void} go to another address
 * @property {(connection: import("./lib/live.js").Connection) => void} connected shows the state of the connection
 */
/**
 * A view on the screen.
 * @typedef {object} View
 * @property {HTMLElement} element
 * @property {(change: Change) => void} [update] new data of the run
 * @property {(route: Route) => void} [reroute] other parameters in the address
 * @property {() => void} [repaint] another theme
 * @property {() => void} [destroy]
 */

/** @type {Record<string, (context: Context) => View>} */
const RUN_VIEWS = { now: nowView, growth: growthView, learning: learningView, story: storyView };

const main = /** @type {HTMLElement} */ (document.getElementById("main"));
const tabs = /** @type {HTMLElement} */ (document.getElementById("tabs"));
const crumb = /** @type {HTMLElement} */ (document.getElementById("crumb"));
const connection = /** @type {HTMLElement} */ (document.getElementById("connection"));

let route = parse(location.pathname, location.search);
/** @type {View | null} */
let view = null;
/** @type {LiveRun | null} */
let live = null;

/** @param {string} address @param {{replace?: boolean}} [options] */
function go(address, { replace: instead = false } = {}) {
  history[instead ? "replaceState" : "pushState"](null, "", address);
  follow();
}

/** Show what the address says. */
function follow() {
  const next = parse(location.pathname, location.search);
  const same = next.page === route.page && next.id === route.id && next.view === route.view;
  const sameRun = next.page === "run" && route.page === "run" && next.id === route.id;
  route = next;
  if (same && view?.reroute) return view.reroute(route);
  if (!sameRun) leaveRun();
  open();
  main.focus({ preventScroll: true });
  scrollTo(0, 0);
}

function leaveRun() {
  live?.stop();
  live = null;
}

/** Mount the view of the present address. */
function open() {
  view?.destroy?.();
  const store = live?.store ?? new RunStore(route.id);
  const context = { route, store, go, connected };
  if (route.page === "run") {
    view = RUN_VIEWS[route.view](context);
    if (live) mount();
    else {
      replace(main, h("p", { class: "notice" }, "Loading…"));
      live = new LiveRun(store, received, connected);
      live.connect();
    }
  } else {
    connected({ state: "idle", text: "" });
    view = route.page === "runs" ? runsView(context) : route.page === "evaluation" ? evaluationView(context) : unknown();
    mount();
  }
  frame();
}

function mount() {
  if (view) replace(main, view.element);
  if (live && live.store.now) view?.update?.({ now: true, rows: true, growth: true, story: true, reset: true });
}

/** @param {Change} change */
function received(change) {
  if (!view) return;
  if (!main.contains(view.element)) replace(main, view.element);
  view.update?.(change);
  frame();
}

/** Title, path and tabs. */
function frame() {
  const name = route.page === "runs" ? "" : route.id;
  const label = route.page === "run" ? VIEWS[/** @type {keyof typeof VIEWS} */ (route.view)] : "";
  const here = label || (route.page === "evaluation" ? "Evaluation" : "Runs");
  document.title = [name, here, "simic watch"].filter(Boolean).join(" · ");
  crumb.textContent = name;
  tabs.hidden = route.page !== "run";
  if (route.page !== "run" || tabs.dataset.at === `${route.id}/${route.view}`) return;
  tabs.dataset.at = `${route.id}/${route.view}`;
  const links = Object.entries(VIEWS).map(([key, text]) =>
    h("a", { href: runAddress(route.id, key), "data-key": key, "aria-current": key === route.view ? "page" : null }, text),
  );
  replace(tabs, links);
}

/** @param {import("./lib/live.js").Connection} now */
function connected({ state, text }) {
  if (connection.dataset.state === state && connection.textContent === text) return;
  connection.dataset.state = state;
  connection.textContent = state === "refused" ? "" : text;
  if (state === "refused") replace(main, h("h1", {}, "Not shown"), h("p", { class: "notice", role: "alert" }, text));
}

/** @returns {View} */
function unknown() {
  const hint = h("p", {}, "There is no such page. ", h("a", { href: "/" }, "See all runs"), ".");
  return { element: h("div", {}, h("h1", {}, "Not found"), hint) };
}

document.addEventListener("click", (event) => {
  const link = /** @type {Element} */ (event.target).closest?.("a[href]");
  const plain = event.button === 0 && !event.metaKey && !event.ctrlKey && !event.shiftKey && !event.altKey;
  if (!link || !plain || event.defaultPrevented || link.getAttribute("href")?.startsWith("#")) return;
  const address = new URL(/** @type {HTMLAnchorElement} */ (link).href);
  if (address.origin !== location.origin || address.pathname.startsWith("/api/")) return;
  event.preventDefault();
  go(address.pathname + address.search);
});
addEventListener("popstate", follow);
setUpTheme(/** @type {HTMLElement} */ (document.getElementById("theme")), () => view?.repaint?.());
open();
