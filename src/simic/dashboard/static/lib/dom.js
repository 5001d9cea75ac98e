/**
 * Builds elements. Text from runs is untrusted: it only ever becomes a text node or an attribute, never markup.
 */

const SVG = "http://www.w3.org/2000/svg";

/** @typedef {Node | string | number | null | undefined | false} Child */
/** @typedef {Child | Child[] | Child[][]} Children */

/**
 * An HTML element.
 * @param {string} tag
 * @param {Record<string, any>} [attributes] `on...` functions are listeners, `style` is an object of CSS properties,
 *   false and null leave an attribute out.
 * @param {...Children} children
 * @returns {any}
 */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/**
 * An SVG element, with the same arguments as `h`.
 * @param {string} tag
 * @param {Record<string, any>} [attributes]
 * @param {...Children} children
 * @returns {any}
 */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/**
 * Put new children into a container that is on screen: focus, open details and scroll positions inside it are kept, as
 * far as elements of the same `data-key` come back.
 * @param {Element} container
 * @param {...Children} children
 */
export function replace(container, ...children) {
  const active = document.activeElement;
  const focused = active && container.contains(active) ? active.getAttribute("data-key") : null;
  const open = new Set(keys(container, "details[open][data-key]"));
  const scrolled = new Map();
  for (const box of container.querySelectorAll("[data-scroll]")) {
    scrolled.set(box.getAttribute("data-scroll"), [box.scrollLeft, box.scrollTop]);
  }
  container.replaceChildren(...nodes(children));
  for (const details of container.querySelectorAll("details[data-key]")) {
    if (open.has(details.getAttribute("data-key"))) /** @type {HTMLDetailsElement} */ (details).open = true;
  }
  for (const box of container.querySelectorAll("[data-scroll]")) {
    const place = scrolled.get(box.getAttribute("data-scroll"));
    if (place) [box.scrollLeft, box.scrollTop] = place;
  }
  if (focused !== null) {
    const again = [...container.querySelectorAll("[data-key]")].find((e) => e.getAttribute("data-key") === focused);
    /** @type {HTMLElement | undefined} */ (again)?.focus({ preventScroll: true });
  }
}

/**
 * A table with a header row; cells are children of `h`.
 * @param {{caption?: string, head: Child[], rows: Child[][], numeric?: number[], class?: string}} data
 * @returns {HTMLElement} a box that scrolls by itself where the table is too wide
 */
export function table({ caption, head, rows, numeric = [], class: name = "" }) {
  const side = (/** @type {number} */ i) => (numeric.includes(i) ? "number" : null);
  return h(
    "div",
    { class: "wide", tabindex: 0, role: "group", "aria-label": caption ?? "Table" },
    h(
      "table",
      { class: name },
      caption ? h("caption", { class: "hidden" }, caption) : null,
      h("thead", {}, h("tr", {}, head.map((cell, i) => h("th", { scope: "col", class: side(i) }, cell)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, i) => h("td", { class: side(i) }, cell))))),
    ),
  );
}

/** A sentence whose parts between backticks are code. @param {string | null | undefined} text @returns {Node[]} */
export function prose(text) {
  const parts = String(text ?? "").split("`");
  return parts.map((part, i) => (i % 2 && i < parts.length - 1 ? h("code", {}, part) : document.createTextNode(part)));
}

/** @param {Element} container @param {string} selector */
function keys(container, selector) {
  return [...container.querySelectorAll(selector)].map((element) => element.getAttribute("data-key"));
}

/** @param {any[]} children @returns {Node[]} */
function nodes(children) {
  return children
    .flat(3)
    .filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : document.createTextNode(String(child))));
}

/** @param {any} element @param {Record<string, any>} attributes @param {any[]} children */
function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const key in value) element.style.setProperty(key, value[key]);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...nodes(children));
  return element;
}
