/**
 * The garden: all traced hosts of an update, each with its lanes.
 */

import { STAGES, stageClass } from "../lib/colours.js";
import { h, replace } from "../lib/dom.js";
import { fixed, known, signed } from "../lib/format.js";
import { episodeReward } from "./host.js";
import { commonScale, lanesOf } from "./lanes.js";

/** @typedef {import("./host.js").Host} Host */

/**
 * @param {HTMLElement} container
 * @param {Host[]} hosts
 * @param {string} selected id of the selected host
 * @param {(host: Host) => string} addressOf
 */
export function drawGarden(container, hosts, selected, addressOf) {
  const scale = commonScale(hosts);
  const groups = Map.groupBy(hosts, (host) => host.group);
  replace(
    container,
    h("h2", { class: "hidden" }, "Hosts"),
    [...groups].map(([group, members]) =>
      h(
        "section",
        { class: "bed", "aria-label": `Group ${group}, task ${members[0].task}` },
        groups.size > 1 || members.length > 1 ? h("h3", {}, `Group ${group} `, h("span", { class: "soft" }, members[0].task)) : null,
        h("div", { class: "plots" }, members.map((host) => plot(host, scale, host.id === selected, addressOf(host)))),
      ),
    ),
  );
}

/** @param {Host} host @param {import("./lanes.js").Scale} scale @param {boolean} selected @param {string} address */
function plot(host, scale, selected, address) {
  const grown = known(host.parameters) && known(host.host_parameters) ? host.parameters / host.host_parameters : null;
  return h(
    "article",
    { class: "plot", "data-selected": selected ? "" : null },
    h(
      "p",
      { class: "plot-head" },
      h("a", { href: address, "data-key": `host-${host.id}`, "aria-current": selected ? "true" : null }, host.id),
      h("span", {}, "score ", h("b", {}, fixed(host.score, 1))),
      h("span", {}, "reward ", h("b", {}, signed(episodeReward(host), 1))),
      known(grown) ? h("span", { title: "parameters, times those of the host" }, "size ", h("b", {}, `×${fixed(grown, 2)}`)) : null,
      host.rolled_back ? h("span", { class: "bad" }, "▲ rolled back") : null,
    ),
    lanesOf(host, scale),
  );
}

/** What colours, letters, heights and lines mean. */
export function gardenLegend() {
  return h(
    "ul",
    { class: "legend stages" },
    Object.entries(STAGES).map(([name, { letter, label, about }]) =>
      h("li", { title: about }, h("span", { class: `chip ${stageClass(name)}`, "aria-hidden": "true" }, letter), label),
    ),
    h("li", {}, h("span", { class: "chip alpha-key", "aria-hidden": "true" }), "height of the fill: alpha"),
    h("li", {}, h("span", { class: "chip line-key", "aria-hidden": "true" }), "line: contribution"),
  );
}
