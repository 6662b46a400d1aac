// The newest requests, and all about one of them.

import { $, h, replace, seconds } from "./dom.js";
import { json } from "./api.js";
import { waterfall } from "./waterfall.js";

const HEADS = ["Request", "Ago", "Of", "Path", "Ended", "Attempts", "First token", "Total"];
let at = 0;
let shown = ""; // id of the one that is open

const items = (one) => Object.entries(one.items).map(([kind, count]) => `${count} ${kind}${count > 1 ? "s" : ""}`).join(", ") || "text";
const ended = (one) => (one.code ? `${one.outcome} ${one.code}` : one.outcome);
const ago = (began) => `${Math.max(0, at - began).toFixed(0)} s`;

function row(one) {
  const open = h("button", { type: "button", class: "link", "data-key": one.id, "aria-expanded": String(one.id === shown), onclick: () => toggle(one.id) }, one.client_id || one.id.slice(0, 8));
  return h("tr", { "data-outcome": one.outcome }, h("th", { scope: "row" }, open), h("td", { "data-began": one.began }, ago(one.began)),
    [items(one), one.path || "–", ended(one), String(one.attempts), seconds(one.first_byte_s), seconds(one.total_s)].map((cell) => h("td", {}, cell)));
}

export function update({ requests }) {
  if (!requests.length) return replace($("request-list"), h("p", { class: "note" }, "No request is remembered yet."));
  replace($("request-list"), h("table", {}, h("caption", { class: "hidden" }, "Newest requests"),
    h("thead", {}, h("tr", {}, HEADS.map((head) => h("th", { scope: "col" }, head)))), h("tbody", {}, requests.map(row))));
}

export function tick(state) {
  at = state.at;
  for (const cell of $("request-list").querySelectorAll("[data-began]")) cell.textContent = ago(Number(cell.dataset.began));
}

async function toggle(id) {
  shown = shown === id ? "" : id;
  for (const button of $("request-list").querySelectorAll("button")) button.setAttribute("aria-expanded", String(button.dataset.key === shown));
  if (!shown) return replace($("request"));
  try {
    const { request } = await json(`page/requests/${encodeURIComponent(id)}`);
    if (shown === id) replace($("request"), details(request));
  } catch (error) {
    replace($("request"), h("p", { class: "note" }, error.message));
  }
}

/** All of a request: how it ended, why it went where it went, and its time. */
export function details(one) {
  const way = [["encode", one.encode.join("+")], ["prefill", one.prefill], ["decode", one.decode]].filter(([, id]) => id).map(([stage, id]) => `${stage} ${id}`).join(", ");
  const tokens = one.tokens.completion ?? one.tokens.counted;
  const facts = [`${one.endpoint}, ${items(one)}`, `${ended(one)} in ${seconds(one.total_s)}`, one.path && `path ${one.path}: ${way}`, tokens !== null && `${tokens} tokens`, one.finish && `finish ${one.finish}`, one.message];
  return h("article", {}, h("h3", {}, `Request ${one.client_id || one.id}`), h("p", {}, facts.filter(Boolean).join(" · ")),
    one.waits.length ? h("ul", {}, one.waits.map((wait) => h("li", {}, `${wait.s === null ? "is waiting" : `waited ${seconds(wait.s)}`} for ${wait.for}: ${wait.why}`))) : null,
    one.choices.length ? h("ul", {}, one.choices.map((choice) => h("li", {}, `${choice.chosen.join(", ")} for ${choice.work}, at ${seconds(choice.at_s)}: ${choice.why}`))) : null,
    h("div", { class: "scroll", role: "region", "aria-label": "Waterfall", tabindex: "0" }, waterfall(one.events, one.total_s)));
}
