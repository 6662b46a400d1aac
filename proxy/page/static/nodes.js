// Nodes, their devices, and what runs on them: drawn, and as a table.

import { $, svg, percent, replace, seconds, table } from "./dom.js";

const CARD = { width: 176, height: 92, gap: 8 };
const HEAD = 22;
const PAD = 8;
const LOOKS = 30; // of which the share is told in which an instance had work

const busy = new Map(); // id: the last looks, 1 where it had work

function note(instances) {
  const ids = new Set(instances.map((row) => row.id));
  for (const id of busy.keys()) if (!ids.has(id)) busy.delete(id);
  for (const { id, stage, pending_s } of instances) {
    const looks = busy.get(id) ?? [];
    looks.push(pending_s !== 0 || (stage && stage.running + stage.waiting > 0) ? 1 : 0);
    busy.set(id, looks.slice(-LOOKS));
  }
}

/** Everything about an instance in one: as the controller has it, and as it reports. */
function merged({ deployment, instances }) {
  const rows = new Map(instances.map((row) => [row.id, row]));
  const known = deployment?.instances ?? instances.map((row) => ({
    id: row.id, role: row.role, both: false, node: "", devices: row.devices, phase: row.up ? "up" : row.draining ? "draining" : "down",
    reason: row.reason, in_flight: Object.values(row.in_flight).reduce((sum, count) => sum + count, 0), restarts: 0,
  }));
  return known.map((one) => {
    const row = rows.get(one.id);
    const looks = busy.get(one.id) ?? [];
    const store = row?.store;
    return {
      ...one,
      role: one.both ? "P|D" : one.role,
      reason: one.reason || row?.reason || "",
      phase: one.phase === "up" && row && row.circuit !== "closed" ? "open" : one.phase,
      running: row?.stage?.running ?? one.in_flight,
      waiting: row?.stage?.waiting ?? 0,
      pending_s: row ? row.pending_s : 0,
      busy: looks.length ? looks.reduce((sum, look) => sum + look, 0) / looks.length : null,
      budgets: row?.stage?.token_budget ? `${row.stage.token_budget} / ${row.stage.item_budget}` : "–",
      kv: row?.stage?.kv_tokens ? row.stage.kv_used : null,
      arena: store?.capacity_bytes ? store.used_bytes / store.capacity_bytes : null,
    };
  });
}

function gauge(label, part, x, y, width) {
  return svg("g", { class: "gauge" },
    svg("text", { x, y: y + 7, class: "small" }, label),
    svg("rect", { x: x + 40, y, width: width - 76, height: 7, rx: 3, class: "track" }),
    part ? svg("rect", { x: x + 40, y, width: Math.max(2, (width - 76) * Math.min(1, part)), height: 7, rx: 3, class: "level" }) : null,
    svg("text", { x: x + width, y: y + 7, class: "small end" }, part === null ? "–" : percent(part)));
}

function card(one, x, y) {
  const inner = CARD.width - 2 * PAD;
  return svg("g", { class: `instance role-${one.role[0]} phase-${one.phase}`, transform: `translate(${x} ${y})`, "data-instance": one.id },
    svg("title", {}, one.reason ? `${one.id}: ${one.phase}, ${one.reason}` : `${one.id}: ${one.phase}`),
    svg("rect", { width: CARD.width, height: CARD.height, rx: 6, class: "card" }),
    svg("rect", { width: 5, height: CARD.height, rx: 2, class: "role" }),
    svg("text", { x: PAD + 4, y: 18, class: "name" }, one.id),
    svg("text", { x: CARD.width - PAD, y: 18, class: "end phase" }, one.phase),
    svg("text", { x: PAD + 4, y: 35, class: "small" }, `run ${one.running} · wait ${one.waiting} · ${one.pending_s === null ? "∞" : seconds(one.pending_s)}`),
    gauge("busy", one.busy, PAD + 4, 44, inner - 4),
    gauge("KV", one.kv, PAD + 4, 59, inner - 4),
    gauge("arena", one.arena, PAD + 4, 74, inner - 4));
}

/** A group that is a device, and how high it is. */
function device(name, own, guests) {
  let y = HEAD;
  const parts = own.map((one) => {
    const drawn = card(one, PAD, y);
    y += CARD.height + CARD.gap;
    return drawn;
  });
  for (const one of guests) {
    parts.push(svg("text", { x: PAD + 4, y: y + 12, class: "small" }, `${one.id}, too`));
    y += 20;
  }
  if (!own.length && !guests.length) {
    parts.push(svg("text", { x: PAD + 4, y: y + 12, class: "small" }, "free"));
    y += 20;
  }
  const height = y + PAD - (own.length ? CARD.gap : 0);
  return { height, draw: (x, top) => svg("g", { transform: `translate(${x} ${top})` },
    svg("rect", { width: CARD.width + 2 * PAD, height, rx: 8, class: "device" }),
    svg("text", { x: PAD, y: 15, class: "small" }, name), parts) };
}

function devicesOf(node, instances) {
  const own = instances.filter((one) => one.node === node.id || !node.id);
  const used = own.flatMap((one) => one.devices);
  const all = [...new Set([...(node.ours ?? []), ...used])].sort((one, other) => one - other);
  return all.map((number) => device(`device ${number}`,
    own.filter((one) => one.devices[0] === number), own.filter((one) => one.devices.slice(1).includes(number))));
}

function drawn(node, instances, width) {
  const devices = devicesOf(node, instances);
  const step = CARD.width + 2 * PAD + CARD.gap;
  const columns = Math.max(1, Math.min(devices.length, Math.floor((width - 2 * PAD + CARD.gap) / step)));
  const parts = [];
  let top = HEAD + PAD;
  for (let from = 0; from < devices.length; from += columns) {
    const line = devices.slice(from, from + columns);
    parts.push(line.map((one, at) => one.draw(PAD + at * step, top)));
    top += Math.max(...line.map((one) => one.height)) + CARD.gap;
  }
  const wide = 2 * PAD + columns * step - CARD.gap;
  const title = node.id ? `node ${node.id} (${node.kind})` : "instances";
  return svg("svg", { width: wide, height: top, viewBox: `0 0 ${wide} ${top}`, role: "img", "aria-label": `${title}: ${instances.map((one) => `${one.id} ${one.phase}`).join(", ")}` },
    svg("rect", { width: wide, height: top, rx: 10, class: "node" }),
    svg("text", { x: PAD, y: 18, class: "name" }, title), parts);
}

export function update(state) {
  note(state.instances);
  const instances = merged(state);
  const width = $("nodes").clientWidth || 360;
  const nodes = state.deployment?.nodes ?? [{ id: "", kind: "" }];
  replace($("nodes"), nodes.map((node) => drawn(node, instances.filter((one) => !node.id || one.node === node.id), width)));
  if (!$("table").open) return;
  const rows = instances.map((one) => [
    one.id, one.role, one.node || "–", one.devices.join(", "), one.reason ? `${one.phase}: ${one.reason}` : one.phase,
    String(one.running), String(one.waiting), one.pending_s === null ? "∞" : seconds(one.pending_s), percent(one.busy),
    one.budgets, percent(one.kv), percent(one.arena), String(one.restarts),
  ]);
  const heads = ["Instance", "Role", "Node", "Devices", "Phase", "Running", "Waiting", "Pending", "Busy", "Prompt / item tokens a step", "KV", "Arena", "Restarts"];
  replace($("table").querySelector(".scroll"), table("Instances", heads, rows));
}
