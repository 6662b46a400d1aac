// What the follower of the load has decided and why, what it has come to, and, with the admin key, its mode.

import { $, h, percent, replace, say, table } from "./dom.js";
import { json } from "./api.js";

const MODES = ["off", "advise", "act"];

function move(one) {
  const target = one.core_share || one.layout;
  return one.reason ? `not ${one.what} to ${target}: ${one.reason}` : `${one.what} to ${target}: ${one.why}`;
}

function item(one) {
  const alike = one.times > 1 ? `, ${one.times} times alike` : "";
  const rates = Object.entries(one.rates_rps).map(([kind, rate]) => `${rate.toFixed(2)} ${kind}`).join(" and ");
  const moves = [...(one.chosen ? [one.chosen] : []), ...one.refused];
  return h("li", { "data-state": one.outcome.split(":")[0] },
    h("p", {}, `${one.ago_s.toFixed(0)} s ago${alike}: ${one.layout} with ${rates} requests/s: ${one.outcome}`),
    h("ul", {}, [...moves.map(move), one.plan].filter(Boolean).map((text) => h("li", {}, text))));
}

function row(group) {
  return [group.group, String(group.there), String(group.wanted), group.needed.toFixed(2), group.peak.toFixed(2)];
}

function budget(one) {
  const beside = one.neighbours.length ? ` beside ${one.neighbours.join(", ")}` : "";
  return `${one.instance}${beside}: ${one.item_tokens} item tokens a step, ${one.held_steps} steps held back`;
}

export function update({ deployment }) {
  const told = deployment?.follow;
  if (!told) return say($("follow-mode"), "No controller is known here: nothing is followed.");
  const [last] = told.decisions;
  say($("follow-mode"), told.mode === "off" ? "off: epd-serve follow advise, or act" : `${told.mode}, every ${told.every_s} s; a group may be busy ${percent(told.use)} of its time`);
  for (const button of $("follow").querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.value === told.mode));
  replace($("follow-groups"), last ? table("Groups", ["Group", "There", told.mode === "act" ? "Wanted" : "Advised", "Needed", "Peak"], last.groups.map(row)) : null);
  say($("follow-budgets"), told.budgets.map(budget).join("; "));
  replace($("decisions"), h("ul", { class: "changes" }, told.decisions.map(item)));
}

/** Switching the mode, for whoever may change the deployment. */
export function open(about) {
  $("follow").hidden = !about.changes;
  replace($("follow").querySelector(".row"), MODES.map((mode) => h("button", { value: mode }, mode)));
  $("follow").onsubmit = async (event) => {
    event.preventDefault();
    try {
      const { mode } = await json("deployment/follow", { body: { mode: event.submitter.value } });
      say($("follow-answer"), `From now on: ${mode}.`);
    } catch (error) {
      say($("follow-answer"), `Refused: ${error.message}`);
    }
  };
}
