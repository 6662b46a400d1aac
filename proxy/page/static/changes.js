// What the controller does and has done, and, with the admin key, having it do something.

import { $, h, plain, replace, seconds, say } from "./dom.js";
import { json } from "./api.js";

let changes = false;
let roles = "";
let ids = "";

function step(one) {
  const words = [plain(one.action), one.instance, one.node && `on ${one.node}`, one.devices && `device ${one.devices.join(", ")}`].filter(Boolean).join(" ");
  if (one.began_s === undefined) return words;
  const took = one.seconds === null ? "…" : `took ${seconds(one.seconds)}`;
  return `at ${seconds(one.began_s)} ${words}, ${took}${one.note ? ` (${one.note})` : ""}`;
}

function item(change) {
  const cut = change.cut_requests ? `, ${change.cut_requests} requests cut off` : "";
  const waited = change.paused_s ? `, new requests waited ${seconds(change.paused_s)}` : "";
  const title = `${change.what} ${change.from} → ${change.to}: ${change.state}${change.reason ? `, ${change.reason}` : ""}, ${seconds(change.seconds)}${cut}${waited}`;
  return h("li", { "data-state": change.state, "data-to": change.to }, h("p", {}, title), h("ol", {}, change.steps.map((one) => h("li", {}, step(one)))));
}

export function update({ deployment }) {
  if (deployment === null) {
    return replace($("change-list"), h("p", { class: "note" }, "No controller is known here: nothing changes but by whoever runs the stages."));
  }
  const told = [...(deployment.change ? [deployment.change] : []), ...[...deployment.past].reverse()];
  replace($("change-list"), h("ul", { class: "changes" }, told.map(item)));
  if (changes) choices(deployment.instances);
}

/** The forms, or how to get them. */
export function open(about) {
  changes = about.changes;
  if (!changes) {
    return replace($("change-forms"), h("p", { class: "note" }, "Read-only. The page of the admin listener changes the deployment, for those who have its key: --admin-port and --admin-key-file. ", h("code", {}, "epd-serve relayout"), " does it on the host."));
  }
  const pause = h("input", { id: "pause", type: "number", min: 0, max: 3600, value: 0 });
  replace($("change-forms"),
    form("relayout", "Relayout", h("input", { id: "layout", required: "", placeholder: "2E-P-D", autocomplete: "off", "aria-label": "Layout" }),
      (dry_run) => ["deployment/layout", { layout: $("layout").value.trim(), pause_s: Number(pause.value), dry_run }]),
    form("scale", "Scale", h("span", { id: "counts" }), (dry_run) => ["deployment/scale", { counts: counts(), pause_s: Number(pause.value), dry_run }]),
    form("drain", "Drain", h("select", { id: "drained", "aria-label": "Instance to drain" }), (dry_run) => [`deployment/instances/${$("drained").value}/drain`, { dry_run }]),
    form("restart", "Restart", h("select", { id: "restarted", "aria-label": "What to restart" }), () => restart(Number(pause.value)), false),
    form("undo", "Undo", h("span", {}, "the last change"), () => ["deployment/undo", { pause_s: Number(pause.value) }], false),
    h("p", {}, h("label", { for: "pause" }, "New requests may wait, seconds at most "), pause),
    h("p", { id: "change-answer", role: "status" }));
}

function form(name, title, field, call, dry = true) {
  const go = async (dry_run) => {
    say($("change-answer"), "asked");
    try {
      const [path, body] = call(dry_run);
      const answer = await json(path, { body });
      const plan = (answer.plan?.waves ?? []).map((wave, at) => `${at + 1}. ${wave.map(step).join(", ")}`).join("; ") || "nothing to do";
      const pauses = answer.plan?.pauses ? " New requests wait meanwhile." : "";
      say($("change-answer"), `${dry_run ? "It would be" : "Begun"}: ${answer.plan ? plan : answer.status}.${pauses} ${(answer.notes ?? []).join(" ")}`);
    } catch (error) {
      say($("change-answer"), `Refused: ${error.message}`);
    }
  };
  return h("form", { id: name, onsubmit: (event) => { event.preventDefault(); go(event.submitter?.value === "dry"); } },
    h("fieldset", {}, h("legend", {}, title), h("div", { class: "row" }, field,
      dry ? h("button", { value: "dry" }, "Dry run") : null, h("button", { value: "go", class: "act" }, title))));
}

const counts = () => Object.fromEntries([...$("counts").querySelectorAll("input")].map((one) => [one.dataset.role, Number(one.value)]));

function restart(pause_s) {
  const name = $("restarted").value;
  if (name === "front") return ["deployment/front/restart", {}];
  return [name === "all" ? "deployment/restart" : `deployment/instances/${name}/restart`, { pause_s }];
}

/** Fields that go by what there is; left alone as long as that is the same, since somebody may be using them. */
function choices(instances) {
  const of = {};
  for (const { role } of instances) of[role] = (of[role] ?? 0) + 1;
  if (JSON.stringify(of) !== roles) {
    roles = JSON.stringify(of);
    replace($("counts"), Object.entries(of).sort().map(([role, count]) => h("label", {}, `${role} `, h("input", { type: "number", min: 0, max: 64, value: count, "data-role": role, "data-key": `count-${role}` }), " ")));
  }
  const names = instances.map((one) => one.id).sort();
  if (names.join() !== ids) {
    ids = names.join();
    const options = (more) => [...more, ...names].map((name) => h("option", { value: name }, name));
    replace($("drained"), options([]));
    replace($("restarted"), options(["all", "front"]));
  }
}
