/**
 * Numbers, dates and sizes as people read them. What was not measured is a dash.
 */

export const NONE = "–";
const MINUS = "\u2212";

/** @param {number | null | undefined} value @returns {value is number} */
export const known = (value) => typeof value === "number" && Number.isFinite(value);

/** A number with fixed decimals. @param {number | null | undefined} value */
export function fixed(value, digits = 1) {
  if (!known(value)) return NONE;
  const text = Math.abs(value).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return (value < 0 && Number(value.toFixed(digits)) !== 0 ? MINUS : "") + text;
}

/** A difference: always with its sign. @param {number | null | undefined} value */
export function signed(value, digits = 1) {
  if (!known(value)) return NONE;
  const text = fixed(value, digits);
  return Number(value.toFixed(digits)) > 0 ? `+${text}` : text;
}

/** A number of any size with about three significant digits. @param {number | null | undefined} value */
export function short(value) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e15 || size < 1e-4) return value.toExponential(1).replace("-", MINUS).replace("e+", "e");
  for (const [limit, unit] of /** @type {[number, string][]} */ ([[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e4, " k"]])) {
    const factor = limit === 1e4 ? 1e3 : limit;
    if (size >= limit) return fixed(value / factor, size / factor >= 100 ? 0 : 1) + unit;
  }
  if (Number.isInteger(value)) return fixed(value, 0);
  return fixed(value, Math.max(0, 2 - Math.floor(Math.log10(size))));
}

/** A difference of any size with two significant digits, always with its sign. @param {number | null | undefined} value */
export function signedShort(value) {
  if (!known(value)) return NONE;
  const rounded = Number(value.toPrecision(2));
  const text = Math.abs(rounded) < 100 ? tick(rounded) : short(rounded);
  return rounded > 0 ? `+${text}` : rounded < 0 ? text : "±0";
}

/** A number without zeros at its end, for axes. @param {number} value */
export function tick(value) {
  const text = short(value);
  return /^[^e]*\.\d+$/.test(text) ? text.replace(/\.?0+$/, "") : text.replace(/\.0(?= )/, "");
}

/** A whole number. @param {number | null | undefined} value */
export const whole = (value) => fixed(value, 0);

/** A share of 1 in percent. @param {number | null | undefined} value */
export function percent(value, digits = 0) {
  return known(value) ? `${fixed(100 * value, digits)} %` : NONE;
}

/** A metric: a share in percent, anything else as it is. @param {number | null | undefined} value */
export const metric = (value) => (known(value) && value >= 0 && value <= 1 ? percent(value, 1) : short(value));

/** A probability in percent; small ones keep a digit. @param {number | null | undefined} value */
export function chance(value) {
  if (!known(value)) return NONE;
  return value >= 0.001 || value === 0 ? percent(value, value < 0.1 ? 1 : 0) : `${short(Number((100 * value).toPrecision(1)))} %`;
}

/** A size in bytes. @param {number | null | undefined} value */
export function bytes(value) {
  if (!known(value)) return NONE;
  for (const [limit, unit] of /** @type {[number, string][]} */ ([[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])) {
    if (value >= limit) return `${fixed(value / limit, value / limit >= 100 ? 0 : 1)} ${unit}`;
  }
  return `${whole(value)} B`;
}

/** A duration by its two largest units. @param {number | null | undefined} seconds */
export function duration(seconds) {
  if (!known(seconds) || seconds < 0) return NONE;
  if (seconds < 1) return `${whole(1000 * seconds)} ms`;
  if (seconds < 10) return `${fixed(seconds, 1)} s`;
  const total = Math.round(seconds);
  const parts = /** @type {[number, string][]} */ ([
    [Math.floor(total / 86400), "d"],
    [Math.floor(total / 3600) % 24, "h"],
    [Math.floor(total / 60) % 60, "min"],
    [total % 60, "s"],
  ]);
  const first = parts.findIndex(([amount]) => amount > 0);
  return parts.slice(first, first + 2).filter(([amount]) => amount > 0).map(([amount, unit]) => `${amount} ${unit}`).join(" ");
}

/** How long ago a moment was. @param {number | null | undefined} unix */
export function ago(unix, now = Date.now() / 1000) {
  if (!known(unix)) return NONE;
  const seconds = Math.max(0, now - unix);
  if (seconds < 5) return "just now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} days ago`;
}

const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year: "numeric" });
const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

/** A moment: the clock alone on the same day. @param {number | null | undefined} unix */
export function moment(unix) {
  if (!known(unix)) return NONE;
  const date = new Date(unix * 1000);
  const clock = CLOCK.format(date);
  return date.toDateString() === new Date().toDateString() ? clock : `${DAY.format(date)}, ${clock}`;
}

/** A setting's value as it would be written. @param {any} value */
export function setting(value) {
  if (value === undefined) return NONE;
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** `num_groups` and `head_entropy/op` as words. @param {string} name */
export const words = (name) => name.replaceAll("_", " ").replace("/", ": ");

/** A count with its noun. @param {number} amount @param {string} one @param {string} [many] */
export const plural = (amount, one, many = `${one}s`) => `${whole(amount)} ${amount === 1 ? one : many}`;
