/**
 * The score of a run against its twins and the rules: a curve of the past and one line of marks.
 */

import { h, s } from "../lib/dom.js";
import { fixed, known, signed } from "../lib/format.js";

const SPARK = { width: 320, height: 64 };

/** @typedef {{name: string, score: number, own: boolean}} Mark */

/** @param {any} now @param {import("../lib/run_store.js").Row[]} rows */
export function scoreStrip(now, rows) {
  /** @type {Mark[]} */
  const training = [];
  if (known(now.score)) training.push({ name: "this run", score: now.score, own: true });
  if (known(now.score) && known(now.gain)) training.push({ name: "twins", score: now.score - now.gain, own: false });
  const compared = Object.entries(now.rules ?? {})
    .filter(([, score]) => known(score))
    .map(([name, score]) => ({ name, score: /** @type {number} */ (score), own: name === "trained" }));
  if (!training.length && !compared.length) return h("p", { class: "soft" }, "No score yet.");
  const scores = [...training, ...compared].map((mark) => mark.score);
  const [low, high] = [Math.min(...scores), Math.max(...scores)];
  return [
    sparkline(rows),
    compared.length && training.length ? h("h3", { class: "strip-title" }, "While training, newest update") : null,
    training.length ? strip(training, low, high) : null,
    compared.length ? h("h3", { class: "strip-title" }, "After training, on new hosts") : null,
    compared.length ? strip(compared, low, high) : null,
  ];
}

/** Mean score by update. @param {import("../lib/run_store.js").Row[]} rows */
function sparkline(rows) {
  const points = rows.map((row) => [row.update, row.metrics.score]).filter(([, y]) => known(y));
  if (points.length < 2) return null;
  const xs = points.map(([x]) => /** @type {number} */ (x));
  const ys = points.map(([, y]) => /** @type {number} */ (y));
  const [low, high, first, last] = [Math.min(...ys), Math.max(...ys), xs[0], xs[xs.length - 1]];
  const x = (/** @type {number} */ value) => (SPARK.width * (value - first)) / (last - first || 1);
  const y = (/** @type {number} */ value) => 4 + (SPARK.height - 8) * (1 - (value - low) / (high - low || 1));
  const line = xs.map((value, i) => `${i ? "L" : "M"}${x(value).toFixed(1)} ${y(ys[i]).toFixed(1)}`).join("");
  const label = `Score from ${fixed(ys[0], 1)} at update ${first} to ${fixed(ys[ys.length - 1], 1)} at update ${last}, between ${fixed(low, 1)} and ${fixed(high, 1)}`;
  return h(
    "figure",
    { class: "spark" },
    s(
      "svg",
      { viewBox: `0 0 ${SPARK.width} ${SPARK.height}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
      s("path", { d: `${line}L${SPARK.width} ${SPARK.height}L0 ${SPARK.height}Z`, class: "spark-area" }),
      s("path", { d: line, class: "spark-line" }),
    ),
    h("figcaption", {}, h("span", {}, `update ${first}: ${fixed(ys[0], 1)}`), h("span", {}, `update ${last}: ${fixed(ys[ys.length - 1], 1)}`)),
  );
}

/** One row per mark, each on the same scale. @param {Mark[]} marks @param {number} low @param {number} high */
function strip(marks, low, high) {
  const own = marks.find((mark) => mark.own)?.score;
  const room = (high - low || 1) * 0.15;
  const place = (/** @type {number} */ score) => String((score - low + room) / (high - low + 2 * room));
  const ordered = [...marks].sort((a, b) => b.score - a.score);
  return h(
    "ul",
    { class: "strip" },
    ordered.map((mark) =>
      h(
        "li",
        { class: mark.own ? "own" : null },
        h("span", { class: "strip-name" }, mark.name),
        h("span", { class: "strip-line", "aria-hidden": "true" }, h("span", { class: "strip-mark", style: { "--place": place(mark.score) } })),
        h("b", {}, fixed(mark.score, 2)),
        h("span", { class: "soft" }, mark.own || !known(own) ? "" : signed(mark.score - own, 2)),
      ),
    ),
  );
}
