/**
 * Every view has an address: addresses to routes and back.
 */

/**
 * @typedef {object} Route
 * @property {"runs" | "run" | "evaluation" | "unknown"} page
 * @property {string} id of the run or evaluation
 * @property {string} view of a run: now, growth, learning or story
 * @property {URLSearchParams} query
 */

export const VIEWS = { now: "Now", growth: "Growth", learning: "Learning", story: "Story" };

/** @param {string} path @param {string} search @returns {Route} */
export function parse(path, search) {
  const query = new URLSearchParams(search);
  const parts = path.split("/").filter(Boolean).map(decode);
  const route = { id: parts.slice(1).join("/"), view: "", query };
  const view = parts[parts.length - 1];
  if (parts.length === 0) return { ...route, page: "runs" };
  if (parts[0] === "evaluation" && parts.length > 1) return { ...route, page: "evaluation" };
  if (parts[0] === "run" && parts.length > 2 && view in VIEWS) return { ...route, page: "run", id: parts.slice(1, -1).join("/"), view };
  if (parts[0] === "run" && parts.length > 1) return { ...route, page: "run", view: "now" };
  return { ...route, page: "unknown" };
}

/**
 * The address of a view of a run; empty parameters are left out.
 * @param {string} id @param {string} view @param {Record<string, string | number | null | undefined>} [query]
 */
export function runAddress(id, view, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const search = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return `/run/${encodeURIComponent(id)}/${view}${search ? `?${search}` : ""}`;
}

/** @param {string} id */
export const evaluationAddress = (id) => `/evaluation/${encodeURIComponent(id)}`;

/** A whole number from an address; null if there is none. @param {URLSearchParams} query @param {string} name */
export function wholeParameter(query, name) {
  const text = query.get(name);
  return text !== null && /^\d{1,12}$/.test(text) ? Number(text) : null;
}

/** The ids of an address' list, such as `with=A,B`. @param {URLSearchParams} query @param {string} name */
export function listParameter(query, name) {
  return (query.get(name) ?? "").split(",").filter(Boolean).map(decode);
}

/** The inverse of `listParameter`: a comma within an id is escaped once more. @param {string[]} ids */
export const listText = (ids) => ids.map((id) => encodeURIComponent(id)).join(",");

/** @param {string} text */
function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
