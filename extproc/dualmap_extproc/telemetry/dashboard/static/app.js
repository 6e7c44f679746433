// The main script: reads snapshots from the stream and shows the pool that the URL selects (#pool=NAMESPACE/NAME).

import { Charts } from "./charts.js";
import { Decisions } from "./decisions.js";
import { el, setAttributes, setText, showEach } from "./dom.js";
import { count, percent, plural, seconds, short, timeOfDay, timeZone } from "./format.js";
import { Instances } from "./instances.js";
import { Rings } from "./rings.js";
import { openStream } from "./stream.js";

const SIGNS = { ok: "✓", warn: "!", bad: "✕", idle: "–" };
const LEVELS = { ok: "healthy", warn: "warning", bad: "the pool misses its SLO or rejects requests", idle: "no traffic" };
const byId = (id) => document.getElementById(id);

let latest = null; // The last snapshot.
let pointed = null; // The decision under the mouse pointer.
let announced = "";
let state = "connecting";

const rings = new Rings(byId("rings"), byId("rings-caption"));
const charts = new Charts(byId("charts"));
const instances = new Instances(byId("instances"), byId("filter"), byId("troubled"), byId("shown"), showPool);
const decisions = new Decisions(
  { list: byId("decisions"), rules: byId("rules"), pause: byId("pause"), note: byId("decisions-note") },
  (decision) => {
    pointed = decision;
    showPair();
  },
);
const stream = openStream(take, showConnection);

/** The pool in the URL; undefined if the fragment is something else, as after the skip link. */
function chosenPool() {
  if (!location.hash) return "";
  if (!location.hash.startsWith("#pool=")) return undefined;
  try {
    return decodeURIComponent(location.hash.slice("#pool=".length));
  } catch {
    // A truncated URL selects no pool.
    return "";
  }
}

function choose() {
  const pool = chosenPool();
  if (pool === undefined) return;
  latest = latest && { ...latest, pool: null, asked: pool };
  decisions.clear();
  pointed = null;
  stream.watch(pool);
}

function take(snapshot) {
  const changed = latest?.pool?.name !== snapshot.pool?.name;
  if (changed) decisions.clear();
  latest = snapshot;
  showPools(snapshot);
  showVerdict(snapshot);
  byId("pool").hidden = !snapshot.pool;
  setText(byId("router"), snapshot.router);
  showPool();
}

function showPools({ pools, pool }) {
  const nodes = byId("pools");
  showEach(nodes, pools, (each) => each.pool, () => el("li", {}, el("a", {}, el("span", { class: "sign", "aria-hidden": "true" }), el("span"), el("span", { class: "hidden" }))), (node, each) => {
    const link = node.firstChild;
    setAttributes(link, { href: `#pool=${encodeURIComponent(each.pool)}`, "aria-current": each.pool === pool?.name ? "page" : null, title: each.headline });
    setAttributes(node, { "data-level": each.level });
    setText(link.children[0], SIGNS[each.level]);
    setText(link.children[1], each.pool);
    setText(link.children[2], ` (${LEVELS[each.level]})`);
  });
}

function showVerdict({ pool, pools, asked }) {
  const verdict = pool?.verdict ?? {
    level: pools.length ? "warn" : "idle",
    headline: asked ? `This router has no pool ${asked}.` : "This router has no pools yet.",
    problems: [],
  };
  byId("verdict").dataset.level = verdict.level;
  setText(byId("headline"), verdict.headline);
  showEach(byId("problems"), verdict.problems, (each) => each.text, () => el("li"), (node, each) => {
    node.dataset.level = each.level;
    setText(node, each.text);
  });
  document.title = `${SIGNS[verdict.level]} ${pool?.name ?? "DualMap"} – DualMap`;
  // Screen readers announce only a change of the level, not every change of a number.
  announce(`${pool?.name ?? ""} ${verdict.level}`, verdict.headline);
}

function announce(what, text) {
  if (what !== announced) {
    announced = what;
    setText(byId("announcement"), text);
  }
}

function showPool() {
  const pool = latest?.pool;
  if (!pool) return;
  const endpoints = rowsOf(pool.endpoints);
  const marked = instances.marked(endpoints, pool);
  showTiles(pool, endpoints);
  rings.show(endpoints, pool.slo.ttft_s, marked);
  charts.show(pool);
  instances.show(endpoints, pool, marked);
  decisions.show(pool, marked);
  showPair();
  setText(byId("about"), `View of router ${latest.router} (version ${latest.version}), connected to ${plural(pool.peers, "other router")}. `
    + `${pool.owner === latest.router ? "This router" : `Router ${pool.owner}`} decides for the pool${pool.owner === latest.router ? "" : ", and its view has the loads of all routers' requests"}. `
    + `Model ${pool.model}, policy ${pool.policy}, ${pool.algorithm} rings of version ${pool.ring_version}. `
    + `Times are in this browser's time zone (${timeZone()}).`);
}

function showPair() {
  rings.showPair(pointed ?? latest?.pool?.decisions.find((each) => each.chosen));
}

/** Converts the columns of a snapshot into one object per instance. */
function rowsOf(columns) {
  const names = Object.keys(columns);
  return (columns.id ?? []).map((_, index) => Object.fromEntries(names.map((name) => [name, columns[name][index]])));
}

function showTiles(pool, endpoints) {
  const { recent, slo, hit_rate: hits, minute, all_routers: all } = pool;
  const sum = (field) => endpoints.reduce((total, each) => total + each[field], 0);
  const serving = endpoints.filter((each) => each.state !== "Draining" && each.state !== "Suspended").length;
  const within = recent.seconds === 60 ? "last minute" : "last 5 minutes";
  const tiles = [
    ["Within SLO", percent(recent.attainment), `goal ${percent(slo.attainment)}, ${within}`],
    ["TTFT, median", seconds(recent.ttft_p50_s), `90th percentile ${seconds(recent.ttft_p90_s)}, SLO ${seconds(slo.ttft_s)}`],
    ["Requests a minute", count(minute.requests), minute.refused ? `${count(minute.refused)} rejected` : "none rejected"],
    ["In flight", count(sum("in_flight")), `on ${plural(endpoints.length, "instance")}`],
    ["Queued", count(pool.held), "requests in this router"],
    ["Pending prefill", short(sum("pending_tokens")), "prompt tokens not yet prefilled"],
    ["Hit rate", percent(hits.measured ?? hits.predicted), hits.measured === null ? "predicted, because the engines report no cached tokens" : `measured; predicted ${percent(hits.predicted)}`],
    ...kvTiles(pool),
    ["Instances", count(serving), all ? `desired: ${count(Math.ceil(all.wanted))}` : `of ${endpoints.length}`],
    ["Routers", count(1 + pool.peers), together(pool.peers, all)],
  ];
  showEach(byId("tiles"), tiles, ([title]) => title, ([title]) => el("div", {}, el("dt", {}, title), el("dd"), el("dd", { class: "muted" })), (node, [, value, note]) => {
    setText(node.children[1], value);
    setText(node.children[2], note);
  });
}

/** What instances fetch instead of computing it, and sessions that changed their instance; empty for pools without these. */
function kvTiles({ fetches_kv: fetches, fetched, moved_sessions: moved }) {
  return [
    ...(fetches ? [["Fetched KV", percent(fetched), "of prompt tokens, predicted, last 5 minutes"]] : []),
    ...(fetches || moved ? [["Session moves", count(moved), "to another instance, last 5 minutes"]] : []),
  ];
}

/** Figures of all routers together. */
function together(peers, all) {
  if (!peers) return "no other router is connected";
  return all ? `all: ${percent(all.attainment)} within SLO, ${count(all.in_flight)} in flight, ${count(all.held)} queued` : "no recent update from other routers";
}

function showConnection(now, silentMs) {
  const node = byId("connection");
  node.dataset.state = document.body.dataset.connection = now;
  const ago = silentMs === null ? 0 : Math.floor(silentMs / 1000);
  if (now === "live") setText(node, "live");
  else if (now === "connecting") setText(node, "connecting");
  else if (latest) setText(node, `no update for ${ago} s: data of ${timeOfDay(latest.at)}; reconnecting`);
  else setText(node, "the router does not answer, reconnecting");
  if (now !== state) {
    if (now === "lost") announce("lost", "The page lost the connection to the router. The data on the page is stale.");
    else if (state === "lost") announce("live", "The page is connected to the router again.");
    if (now === "lost") document.title = `? ${latest?.pool?.name ?? "DualMap"} – DualMap`;
    state = now;
  }
}

addEventListener("hashchange", choose);
if (chosenPool() === undefined) stream.watch("");
else choose();
