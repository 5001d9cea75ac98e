/**
 * Colours and signs: everything that has a colour also has a letter, a shape or a pattern.
 */

/** Series of charts in order; safe for colour blindness (Okabe and Ito, darkened or lightened by CSS per theme). */
const SERIES = 10;

/** The CSS variable of the colour of series number `i`. @param {number} i */
export const seriesVariable = (i) => `--series-${(i % SERIES) + 1}`;

/** Reward terms in the order of their colours; others follow by name. */
const TERMS = ["score", "twin", "rent", "attribution", "compute", "intervention", "rollback", "forfeit", "terminal", "proxy"];

/** Names of reward terms in their fixed order, so that a term looks the same everywhere. @param {Iterable<string>} names */
export function termOrder(names) {
  const rank = (/** @type {string} */ name) => (TERMS.includes(name) ? TERMS.indexOf(name) : TERMS.length);
  return [...new Set(names)].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
}

/** The variable of a term's colour. @param {string} name @param {string[]} names all of them, in order */
export function termVariable(name, names) {
  const known = TERMS.indexOf(name);
  return seriesVariable(known >= 0 ? known : TERMS.length + names.filter((own) => !TERMS.includes(own)).indexOf(name));
}

/** @typedef {{letter: string, label: string, about: string}} Stage */
/** @type {Record<string, Stage>} */
export const STAGES = {
  dormant: { letter: "", label: "dormant", about: "empty slot" },
  germinated: { letter: "G", label: "germinated", about: "seed planted" },
  training: { letter: "T", label: "training", about: "learns without effect on the output" },
  blending: { letter: "B", label: "blending", about: "alpha moves to its target" },
  holding: { letter: "H", label: "holding", about: "alpha is at its target" },
  fossilized: { letter: "F", label: "fossilized", about: "part of the host for good" },
  pruned: { letter: "P", label: "pruned", about: "seed removed" },
  embargoed: { letter: "E", label: "embargoed", about: "slot waits after a prune" },
  resetting: { letter: "R", label: "resetting", about: "slot becomes empty" },
};

/** @param {string} stage @returns {Stage} */
export const stageOf = (stage) => STAGES[stage] ?? { letter: stage.slice(0, 1).toUpperCase(), label: stage, about: "" };

/** The CSS class of a stage; unknown stages of later versions look dormant. @param {string} stage */
export const stageClass = (stage) => `stage-${stage in STAGES ? stage : "dormant"}`;

/** Operations in the order of charts, each with the variable of its colour. */
export const OPS = {
  wait: "--op-wait",
  germinate: "--op-germinate",
  advance: "--op-advance",
  set_alpha_target: "--op-alpha",
  fossilize: "--op-fossilize",
  prune: "--op-prune",
};

export const SEVERITIES = {
  info: { sign: "·", label: "info" },
  notice: { sign: "◆", label: "notice" },
  warning: { sign: "▲", label: "warning" },
  error: { sign: "■", label: "error" },
};

export const LIGHTS = {
  ok: { sign: "●", label: "healthy" },
  warn: { sign: "▲", label: "look at it" },
  bad: { sign: "■", label: "unhealthy" },
  unknown: { sign: "○", label: "not measured" },
};

export const STATUS_SIGNS = { running: "▶", done: "✓", stopped: "◼", diverged: "✕", failed: "✕", stale: "?" };

/** The colour that a CSS variable has in the present theme, for canvases. @param {string} variable */
export function colourOf(variable) {
  probe ??= document.body.appendChild(document.createElement("span"));
  probe.hidden = true;
  probe.style.setProperty("color", `var(${variable})`);
  return getComputedStyle(probe).color;
}
/** @type {HTMLElement | undefined} */
let probe;

/** The same colour, more transparent. @param {string} variable @param {number} alpha */
export function faded(variable, alpha) {
  const numbers = colourOf(variable).match(/[\d.]+/g) ?? ["128", "128", "128"];
  return `rgba(${numbers.slice(0, 3).join(", ")}, ${alpha})`;
}
