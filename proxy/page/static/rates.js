// The last minute, as figures and as curves of what this tab has seen.

import { $, h, milliseconds, percent, replace, say, seconds } from "./dom.js";

const SPAN_S = 600;
const HEIGHT = 150;
const LINES = { encode: "encoders", serve: "prefill and decode" };
const hundred = (share) => (share === null ? null : 100 * share);
const CHARTS = [
  { id: "ttft", title: "Time to first token, ms", series: [["p50", (r) => r.ttft_ms.p50], ["p99", (r) => r.ttft_ms.p99]] },
  { id: "tpot", title: "Time per token, ms", series: [["p50", (r) => r.tpot_ms.p50], ["p99", (r) => r.tpot_ms.p99]] },
  { id: "goodput", title: "Requests per second", series: [["all", (r) => r.requests_per_s], ["goodput by its judge", (r) => r.slo.goodput_per_s]] },
  { id: "attainment", title: "SLO attainment, %", series: [["by its judge", (r) => hundred(r.slo.attainment)], ["by the mean", (r) => hundred(r.slo.mean.attainment)]], range: [0, 100] },
];
const seen = CHARTS.map(({ series }) => [[], ...series.map(() => [])]);
let plots = null;
let judge = "";

const clock = (at_s) => new Date(1000 * at_s).toLocaleTimeString("en-GB");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function plot({ title, series, range }, data) {
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const place = h("figure", { role: "img", "aria-label": title }, h("figcaption", {}, title));
  $("charts").append(place);
  const made = new uPlot({
    width: place.clientWidth, height: HEIGHT,
    legend: { live: false },
    cursor: { points: { show: false }, drag: { x: false, y: false } },
    scales: { y: { range: range ? () => range : (_, least, most) => [0, most > 0 ? most * 1.1 : 1] } },
    axes: [{ ...axis, space: 70, values: (_, ticks) => ticks.map(clock) }, { ...axis, size: 48 }],
    series: [{}, ...series.map(([label], at) => ({ label: label.replace("its judge", judge), stroke: colour(at ? "--second" : "--first"), width: 2, points: { show: false }, spanGaps: false, dash: at ? [6, 3] : undefined }))],
  }, data, place);
  new ResizeObserver(() => made.setSize({ width: place.clientWidth, height: HEIGHT })).observe(place);
  return made;
}

function draw() {
  $("charts").replaceChildren();
  plots = CHARTS.map((chart, at) => plot(chart, seen[at]));
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots && draw());

function keep(at, told) {
  CHARTS.forEach(({ series }, chart) => {
    const data = seen[chart];
    data[0].push(at);
    series.forEach(([, value], one) => data[one + 1].push(value(told)));
    while (data[0][0] < at - SPAN_S) data.forEach((values) => values.shift());
  });
}

const pair = (times) => `${milliseconds(times.p50)} / ${milliseconds(times.p99)}`;
const counted = (counts) => Object.entries(counts).map(([name, count]) => `${count} ${name}`).join(", ");

export function update({ rates: told, at }) {
  const others = Object.fromEntries(Object.entries(told.codes).filter(([code]) => !(code in told.refused)));
  const named = `${told.slo.judge} / mean`;
  const judged = told.slo.judge === "mean" ? "on average" : `for ${told.slo.judge.slice(1)} % of its later tokens`;
  const tiles = [
    ["Requests per second", told.requests_per_s.toFixed(1)], ["Tokens per second", told.tokens_per_s.toFixed(0)],
    ["Running", `${told.running}, ${told.waiting} waiting`],
    ...Object.entries(told.lines).map(([line, one]) => [`In line for ${LINES[line]}`, one.waiting ? `${one.waiting}: ${seconds(one.work_s)} of work, ${one.late} late, ${one.over_share} over their share` : "nobody"]),
    ["TTFT p50 / p99", pair(told.ttft_ms)], ["TPOT p50 / p99", pair(told.tpot_ms)],
    [`SLO attainment, ${named}`, `${percent(told.slo.attainment)} / ${percent(told.slo.mean.attainment)}`],
    [`Goodput per second, ${named}`, `${told.slo.goodput_per_s.toFixed(2)} / ${told.slo.mean.goodput_per_s.toFixed(2)}`],
    ...(told.planned === null ? [] : [[`Planned: rate, TTFT p50, TPOT p50, attainment`, `${told.planned.rate_rps.toFixed(1)} / ${milliseconds(told.planned.ttft_ms)} / ${milliseconds(told.planned.tpot_ms)} / ${percent(told.planned.attainment)}`]]),
    ...(told.planned?.apart.length ? [["Not as planned", told.planned.apart.join("; ")]] : []),
    ...("serving" in told ? [["Front doors that have answered", `${told.answered} of ${told.serving}`]] : []),
    ["Refused", counted(told.refused) || "none"], ["Errors", counted(others) || "none"],
  ];
  replace($("tiles"), tiles.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  say($("slo"), `Within the SLO: a first token within ${milliseconds(1000 * told.slo.ttft_s)}, then ${milliseconds(1000 * told.slo.tpot_s)} at most before each token, ${judged} (--proxy slo.ttft_s=…, slo.tpot_s=…, slo.judge=…); beside it by the mean. Curves are of this tab's time, ten minutes at most; each point is of the minute before it.`);
  keep(at, told);
  if (plots === null || judge !== told.slo.judge) {
    judge = told.slo.judge;
    return draw();
  }
  plots.forEach((one, chart) => one.setData(seen[chart]));
}
