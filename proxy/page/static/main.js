// The page: asks what it is here, for a key where one is wanted, and hands on what it is told to its sections.

import { $, h, say, replace } from "./dom.js";
import { follow, json, key } from "./api.js";
import * as nodes from "./nodes.js";
import * as rates from "./rates.js";
import * as requests from "./requests.js";
import * as following from "./following.js";
import * as changes from "./changes.js";
import * as playground from "./playground.js";

const TITLES = { deployment: "Deployment", rates: "Rates", playground: "Playground", requests: "Requests", following: "Following", changes: "Changes" };
const state = { about: null, deployment: null, instances: [], rates: null, requests: [], at: Date.now() / 1000 };

function show(...names) {
  for (const name of Object.keys(TITLES)) $(name).hidden = !names.includes(name);
  replace($("sections"), names.map((name) => h("a", { href: `#${name}` }, TITLES[name])));
}

function trouble(text) {
  $("trouble").hidden = !text;
  say($("trouble"), text);
}

function headline() {
  const told = state.deployment;
  if (told === null) return say($("headline"), `${state.instances.length} instances`);
  const waits = told.paused_s ? `, new requests wait for ${told.paused_s.toFixed(0)} s more` : "";
  say($("headline"), `${told.layout} · ${told.state}${waits}`);
  $("headline").dataset.state = told.state;
}

const take = {
  tick: ({ at }) => {
    state.at = at;
    requests.tick(state);
  },
  trouble: (text) => trouble(text ? `Nothing new is known: ${text}` : ""),
  deployment: (told) => {
    state.deployment = told;
    trouble(told?.trouble ? `Not reached: ${told.trouble}` : "");
    following.update(state);
    changes.update(state);
  },
  instances: (told) => {
    state.instances = told;
    nodes.update(state);
    headline();
  },
  rates: (told) => {
    state.rates = told;
    rates.update(state);
  },
  requests: (told) => {
    state.requests = told;
    requests.update(state);
  },
};

/** Returns when there is a key to try. */
function wanted(note) {
  const section = $("key");
  section.hidden = false;
  say($("key-note"), note);
  $("key-input").focus();
  return new Promise((resolve) => {
    section.querySelector("form").onsubmit = (event) => {
      event.preventDefault();
      key.set($("key-input").value.trim());
      $("key-input").value = "";
      section.hidden = true;
      resolve();
    };
  });
}

function elsewhere(about) {
  const note = $("elsewhere");
  note.hidden = false;
  if (!about.observes) {
    say(note, "What the deployment does is shown on its admin listener (--admin-port), at / there.");
  } else if (!about.asks) {
    const address = `${about.clients_tls ? "https:" : "http:"}//${location.hostname}:${about.clients_port}/`;
    replace(note, h("span", {}, "The playground is where models are asked: ", h("a", { href: address }, address)));
  } else {
    note.hidden = true;
  }
}

async function main() {
  const about = (state.about = await json("page/about"));
  elsewhere(about);
  following.open(about);
  changes.open(about);
  const seen = about.observes ? ["deployment", "rates"] : [];
  const rest = about.observes ? ["requests", "following", "changes"] : [];
  const sections = [...seen, ...(about.asks ? ["playground"] : []), ...rest];
  let note = about.key === "admin" ? "The one of --admin-key-file." : "One of the server's API keys.";
  for (;;) {
    if (about.key && !key.get()) await wanted(`${note} It is kept until this tab is closed.`);
    try {
      if (about.asks) await playground.open(about);
    } catch (error) {
      if (error.status !== 401) throw error;
      key.set("");
      note = "That key was refused.";
      continue;
    }
    show(...sections);
    if (!about.observes) return;
    await follow("page/events", (name, value) => take[name]?.(value), (why) => trouble(`Not connected: ${why}`));
    key.set("");
    show();
    note = "That key was refused.";
  }
}

main().catch((error) => trouble(`The page has failed: ${error.message}`));
