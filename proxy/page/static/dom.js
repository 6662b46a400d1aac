// Elements, and how values are written. Nothing here knows what the page is about.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && typeof value === "boolean") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An HTML element; attributes whose names begin with `on` are listeners. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export const $ = (id) => document.getElementById(id);

/** New children for `parent`. The one with the focus keeps it, if there is one of the same `data-key` again. */
export function replace(parent, ...children) {
  const held = parent.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  parent.replaceChildren(...children.flat(Infinity).filter(Boolean));
  if (held !== undefined) parent.querySelector(`[data-key="${CSS.escape(held)}"]`)?.focus({ preventScroll: true });
}

/** Text of an element, written only if it is another one: screen readers read what is written. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Rows of cells below their heads; a cell is text or an element. */
export function table(caption, heads, rows) {
  return h("table", {},
    h("caption", { class: "hidden" }, caption),
    h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, at) => h(at ? "td" : "th", at ? {} : { scope: "row" }, cell))))));
}

export function milliseconds(ms) {
  if (ms === null || ms === undefined) return "–";
  return ms >= 10000 ? `${(ms / 1000).toFixed(1)} s` : ms >= 100 ? `${ms.toFixed(0)} ms` : `${ms.toFixed(1)} ms`;
}

export const seconds = (s) => milliseconds(s === null || s === undefined ? null : 1000 * s);
export const percent = (part) => (part === null || part === undefined ? "–" : `${(100 * part).toFixed(part > 0.995 || part < 0.1 ? 1 : 0)} %`);
export const plain = (words) => words.replaceAll("_", " ");
