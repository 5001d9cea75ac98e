/**
 * A host as a network: its segments in a row, the seed of each slot above its segment. Areas follow the number of
 * parameters, the opacity of a seed and its connections follows alpha.
 */

import { stageClass, stageOf } from "../lib/colours.js";
import { h, s, table } from "../lib/dom.js";
import { fixed, known, NONE, short, signedShort } from "../lib/format.js";
import { stateAfter } from "./host.js";

const EDGE = 26;
const HEIGHT = 246;
const CHAIN = 176;
const SEED = 70;
/** Width of a segment's column: as the place allows, within these bounds. */
const COLUMN = { least: 68, most: 150 };
/** Of a name, in pixels. */
const LETTER = 7.4;

/** @typedef {import("./host.js").Host} Host */
/** @typedef {{x: number, width: number, height: number, room: number}} Box */

/** @param {Host} host @param {number} t position of the decision after which it is drawn @param {number} place width in pixels */
export function network(host, t, place) {
  const segments = host.segments?.length ? host.segments : host.slots.map((slot) => ({ name: slot.name, parameters: null }));
  const column = Math.max(COLUMN.least, Math.min(COLUMN.most, (place - 2 * EDGE) / segments.length));
  const width = 2 * EDGE + column * segments.length;
  const largest = Math.max(1, ...segments.map((own) => own.parameters ?? 0));
  const boxes = segments.map((own, i) => {
    const share = Math.sqrt((own.parameters ?? largest / 4) / largest);
    return { x: EDGE + column * (i + 0.5), width: 22 + 34 * share, height: 20 + 46 * share, room: column / LETTER };
  });
  const slots = host.slots.map((slot, i) => ({ slot, state: stateAfter(host, slot, t), column: columnOf(segments, slot.name, i) }));
  const live = slots.filter(({ state }) => state.stage !== "dormant");
  const label = `Network of host ${host.id}: ${segments.length} segments, ${live.length} slots in use`;
  const drawing = s(
    "svg",
    { width, height: HEIGHT, class: "network", role: "img", "aria-label": label },
    s("line", { class: "wire", x1: 8, x2: width - 8, y1: CHAIN, y2: CHAIN }),
    s("text", { class: "net-end", x: 6, y: CHAIN - 8 }, "in"),
    s("text", { class: "net-end", x: width - 6, y: CHAIN - 8, "text-anchor": "end" }, "out"),
    slots.map(({ slot, state, column }) => seed(slot, state, boxes[column], largest)),
    segments.map((own, i) => segment(own, boxes[i])),
  );
  return h("div", { class: "wide network-box", "data-scroll": "network", tabindex: 0, role: "group", "aria-label": label }, drawing);
}

/** The same as text. @param {Host} host @param {number} t */
export function networkTable(host, t) {
  const rows = host.slots.map((slot) => {
    const state = stateAfter(host, slot, t);
    const { label } = stageOf(state.stage);
    const alpha = state.stage === "dormant" ? NONE : fixed(state.alpha, 2);
    return [slot.name, label, state.blueprint || NONE, alpha, signedShort(state.contribution), short(slot.parameters)];
  });
  const head = ["Slot", "Stage", "Blueprint", "Alpha", "Contribution", "Parameters"];
  return table({ caption: `Slots of host ${host.id}`, head, rows, numeric: [3, 4, 5] });
}

/** The segment that a slot belongs to: the one of its name, or of its number. @param {{name: string}[]} segments @param {string} name @param {number} i */
function columnOf(segments, name, i) {
  const found = segments.findIndex((own) => own.name === name);
  return found >= 0 ? found : Math.min(i, segments.length - 1);
}

/** @param {{name: string, parameters: number | null}} own @param {Box} box */
function segment(own, { x, width, height, room }) {
  return s(
    "g",
    {},
    s("rect", { class: "segment", x: x - width / 2, y: CHAIN - height / 2, width, height, rx: 4 }),
    s("text", { class: "net-name", x, y: CHAIN + height / 2 + 15, "text-anchor": "middle" }, fit(own.name, room)),
    known(own.parameters) ? s("text", { class: "net-small", x, y: CHAIN + height / 2 + 29, "text-anchor": "middle" }, short(own.parameters)) : null,
  );
}

/** @param {import("./host.js").Slot} slot @param {import("./host.js").SlotState} state @param {Box} box @param {number} largest */
function seed(slot, state, { x, width, height, room }, largest) {
  const { letter, label } = stageOf(state.stage);
  const empty = ["dormant", "embargoed", "resetting", "pruned"].includes(state.stage);
  const share = Math.min(1, Math.sqrt((slot.parameters ?? 0) / largest));
  const radius = empty ? 10 : 12 + 20 * share;
  const alpha = empty ? 0 : state.alpha;
  const [top, side] = [CHAIN - height / 2, width / 2 + 9];
  const branch = `M${x - side} ${CHAIN}C${x - side} ${top - 20} ${x - radius} ${SEED + 40} ${x - radius * 0.7} ${SEED + radius * 0.7}M${x + side} ${CHAIN}C${x + side} ${top - 20} ${x + radius} ${SEED + 40} ${x + radius * 0.7} ${SEED + radius * 0.7}`;
  const name = state.blueprint && !empty ? fit(state.blueprint, room) : label;
  return s(
    "g",
    { class: stageClass(state.stage) },
    s("path", { class: "branch", d: branch, "stroke-opacity": 0.12 + 0.88 * alpha, "stroke-width": 1 + 2 * alpha }),
    s("circle", { class: "seed-back", cx: x, cy: SEED, r: radius }),
    s("circle", { class: empty ? "seed-empty" : "seed", cx: x, cy: SEED, r: radius, "fill-opacity": 0.12 + 0.88 * alpha }),
    s("text", { class: "net-letter", x, y: SEED + 4, "text-anchor": "middle" }, letter),
    s("text", { class: "net-name", x, y: 15, "text-anchor": "middle" }, name),
    empty ? null : s("text", { class: "net-small", x, y: 30, "text-anchor": "middle" }, `α ${fixed(alpha, 2)}`, known(state.contribution) ? `  ${signedShort(state.contribution)}` : ""),
    s("title", {}, `${slot.name}: ${label} ${state.blueprint}`),
  );
}

/** @param {string} text @param {number} length */
const fit = (text, length) => (text.length > length ? `${text.slice(0, Math.max(1, Math.floor(length) - 1))}…` : text);
