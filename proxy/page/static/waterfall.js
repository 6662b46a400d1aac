// Where a request's time went: what happened, when, and for how long, each with a bar. The names are those of
// `epd-serve why`.

import { h, plain, seconds, svg } from "./dom.js";

const WIDE = 1000;
const PLACES = new Set(["at_s", "event", "s", "stage"]);

function words(event) {
  const rest = Object.entries(event).filter(([name, value]) => !PLACES.has(name) && value !== "" && value !== null);
  const details = rest.map(([name, value]) => (typeof value === "string" ? value : `${name}=${typeof value === "object" ? JSON.stringify(value) : value}`));
  return [plain(event.event), event.stage, ...details].filter(Boolean).join(" ");
}

function bar({ at_s, s }, total_s) {
  const end = (WIDE * at_s) / total_s;
  const begin = s === undefined ? end : (WIDE * Math.max(0, at_s - s)) / total_s;
  const long = s === undefined ? 3 : Math.max(3, end - begin);
  return svg("svg", { viewBox: `0 0 ${WIDE} 10`, preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("line", { x1: 0, x2: WIDE, y1: 5, y2: 5, class: "rest" }),
    svg("rect", { x: Math.min(begin, WIDE - long), y: s === undefined ? 0 : 1, width: long, height: s === undefined ? 10 : 8, class: s === undefined ? "mark" : "took" }));
}

/** A table of `events`, as a request's report has them, over `total_s`. */
export function waterfall(events, total_s) {
  const whole = Math.max(total_s, 1e-6, ...events.map((event) => event.at_s));
  return h("table", { class: "waterfall" },
    h("caption", {}, `Waterfall, ${seconds(whole)} in all`),
    h("thead", {}, h("tr", {}, ["What", "At", "Took", "When"].map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, events.map((event) => h("tr", { "data-event": event.event },
      h("th", { scope: "row" }, words(event)), h("td", {}, seconds(event.at_s)),
      h("td", {}, event.s === undefined ? "" : seconds(event.s)), h("td", { class: "bar" }, bar(event, whole))))));
}
