// The playground: pictures and a question to the model, its answer as it comes, and where the time went.

import { $, h, replace, say, seconds } from "./dom.js";
import { ask, events, json } from "./api.js";
import { details } from "./requests.js";
import { waterfall } from "./waterfall.js";

const pictures = []; // { name, url }: data URLs, as they are sent
let about = null;
let stopping = null;

const read = (blob) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(blob);
});

async function add(blobs, name = "") {
  for (const blob of blobs) if (blob.type.startsWith("image/")) pictures.push({ name: name || blob.name || "picture", url: await read(blob) });
  list();
}

function list() {
  replace($("pictures"), pictures.map((one, at) => h("li", {}, h("img", { src: one.url, alt: one.name, height: 72 }),
    h("button", { type: "button", class: "link", "data-key": `remove-${at}`, "aria-label": `Remove ${one.name}`, onclick: () => { pictures.splice(at, 1); list(); } }, "remove"))));
}

async function sample(name) {
  await add([await (await ask(`page/${name}`)).blob()], name.split("/").pop().replace(".png", "").replaceAll("_", " "));
}

function listen() {
  const drop = $("drop");
  for (const [type, over] of [["dragover", true], ["dragleave", false], ["drop", false]]) {
    drop.addEventListener(type, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", over);
      if (type === "drop") add(event.dataTransfer.files);
    });
  }
  document.addEventListener("paste", (event) => {
    if ($("playground").hidden || !event.clipboardData.files.length) return;
    event.preventDefault();
    add(event.clipboardData.files);
  });
  $("file").addEventListener("change", (event) => add(event.target.files).then(() => { event.target.value = ""; }));
  $("stop").addEventListener("click", () => stopping?.abort());
  $("playground").querySelector("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
}

/** Once there is a key, if one is wanted; throws Refusal where it is the wrong one. */
export async function open(told) {
  const { data } = await json("v1/models");
  replace($("model"), data.map(({ id }) => h("option", { value: id }, id)));
  if (about !== null) return;
  about = told;
  replace($("samples"), about.samples.map((name) => h("button", { type: "button", class: "sample", onclick: () => sample(name), "aria-label": `Sample ${name.split("/").pop()}` }, h("img", { src: `page/${name}`, alt: "", height: 36 }))));
  listen();
}

function body() {
  const content = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  content.push({ type: "text", text: $("prompt").value });
  return { model: $("model").value, messages: [{ role: "user", content }], max_tokens: Number($("most").value) || 128, temperature: 0, stream: true, stream_options: { include_usage: true } };
}

async function send() {
  stopping = new AbortController();
  const text = h("p", { class: "text" });
  const status = h("p", { class: "note", "data-state": "asking" }, "asked");
  replace($("answer"), text, status);
  replace($("answer-times"));
  [$("ask").disabled, $("stop").hidden] = [true, false];
  const began = performance.now();
  const since = () => (performance.now() - began) / 1000;
  let response = null;
  let first = null;
  let ended = "cut off: the stream ended without [DONE]";
  let state = "failed";
  try {
    response = await ask("v1/chat/completions", { body: body(), headers: { "x-epd-explain": "1" }, signal: stopping.signal });
    for await (const { data } of events(response)) {
      if (data === "[DONE]") {
        [ended, state] = ["answered", "answered"];
        continue;
      }
      const told = JSON.parse(data);
      if (told.error) {
        ended = told.error.message;
        break;
      }
      const delta = told.choices[0]?.delta?.content;
      if (!delta) continue;
      first ??= since();
      text.textContent += delta;
      say(status, `first token after ${seconds(first)}`);
    }
  } catch (error) {
    ended = error.name === "AbortError" ? "stopped" : error.message;
  }
  [$("ask").disabled, $("stop").hidden] = [false, true];
  status.dataset.state = state;
  say(status, [ended, first && `first token after ${seconds(first)}`, `${seconds(since())} in all`].filter(Boolean).join(", "));
  if (response !== null) await times(response.headers, first, since());
}

/** The request as the front door remembers it, once it has ended there, which is a moment after its last byte; else null. */
async function remembered(id) {
  for (let tries = 0; tries < 20; tries++) {
    try {
      const { request } = await json(`page/requests/${encodeURIComponent(id)}`);
      if (request.outcome !== "running") return request;
    } catch (error) {
      if (error.status !== 404) return null; // the headers of the answer tell most of it, too
    }
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  return null;
}

/** Where the time went: as the front door remembers it, or else as far as the answer's headers and this tab can say. */
async function times(headers, first_s, total_s) {
  const request = about.observes ? await remembered(headers.get("x-epd-request-id") ?? headers.get("x-request-id")) : null;
  if (request !== null) return replace($("answer-times"), details(request));
  const told = (headers.get("x-epd-timing-ms") ?? "").split(", ").filter(Boolean).map((moment) => moment.split("="));
  const moments = told.map(([event, ms]) => ({ event, at_s: Number(ms) / 1000 }));
  if (first_s !== null) moments.push({ event: "first token in this tab", at_s: first_s });
  replace($("answer-times"), waterfall([...moments, { event: "ended in this tab", at_s: total_s }], total_s));
}
