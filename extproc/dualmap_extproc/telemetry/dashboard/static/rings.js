// The picture of both rings: an arc per instance, a bar for its pending prefill, and the pair of one decision.

import { count, percent, plural, seconds } from "./format.js";
import { setAttributes, showEach, svg } from "./dom.js";

const RING_1 = [106, 120];
const RING_2 = [86, 100];
const LOAD_FROM = 125;
const LOAD_AT_SLO = 30; // The length of a bar if the pending prefill takes as long as the SLO.
const LOAD_MOST = 52;
const LABELS = 14; // More labels would overlap.
const NAME = 12; // The most characters of a label.

/** Return the angles of each instance on a ring by its share, in turns from the top: {id: [from, to]}. */
export function layOut(endpoints, share) {
  const arcs = new Map();
  let from = 0;
  for (const each of endpoints) {
    if (each[share] > 0) {
      arcs.set(each.id, [from, from + each[share]]);
      from += each[share];
    }
  }
  return arcs;
}

export class Rings {
  constructor(node, caption) {
    this.node = node;
    this.caption = caption;
    this.arcs = [new Map(), new Map()];
    this.layers = {};
    for (const name of ["load", "slo", "ring2", "ring1", "chord", "labels"]) {
      this.layers[name] = svg("g", { class: name });
      node.append(this.layers[name]);
    }
    this.layers.slo.append(svg("circle", { r: LOAD_FROM + LOAD_AT_SLO }));
  }

  show(endpoints, slo, marked) {
    const [ring1, ring2] = (this.arcs = [layOut(endpoints, "ring_1"), layOut(endpoints, "ring_2")]);
    const onRing = endpoints.filter((each) => ring1.has(each.id));
    // The picture can be larger if it has no labels.
    setAttributes(this.node, { viewBox: onRing.length <= LABELS ? "-262 -200 524 400" : "-182 -182 364 364" });
    this.arcsOf(this.layers.ring1, onRing, ring1, RING_1, marked);
    this.arcsOf(this.layers.ring2, endpoints.filter((each) => ring2.has(each.id)), ring2, RING_2, marked);
    showEach(this.layers.load, onRing, (each) => each.id, () => svg("path"), (node, each) => {
      const [from, to] = inset(ring1.get(each.id), 0.2);
      const length = Math.min(LOAD_MOST, (each.backlog_s / slo) * LOAD_AT_SLO);
      setAttributes(node, { d: length > 0.3 ? band(from, to, LOAD_FROM, LOAD_FROM + length) : "", "data-load": loadOf(each, slo) });
    });
    this.label(onRing, ring1, slo);
    this.caption.textContent = describe(endpoints, onRing, slo);
  }

  arcsOf(layer, endpoints, arcs, [inner, outer], marked) {
    showEach(layer, endpoints, (each) => each.id, () => svg("path", {}, svg("title")), (node, each) => {
      const [from, to] = inset(arcs.get(each.id), 0.04);
      setAttributes(node, {
        d: band(from, to, inner, outer),
        "data-state": each.state,
        "data-marked": marked && marked.has(each.id) ? "" : null,
      });
      const text = `${each.id}: ${percent(to - from > 0.999 ? 1 : arcs.get(each.id)[1] - arcs.get(each.id)[0])} of the keys, `
        + `${count(each.in_flight)} in flight, ${seconds(each.backlog_s)} of pending prefill`;
      if (node.firstChild.textContent !== text) node.firstChild.textContent = text;
    });
  }

  label(endpoints, arcs, slo) {
    const named = endpoints.length <= LABELS
      ? endpoints
      : endpoints.filter((each) => each.backlog_s > slo).sort((a, b) => b.backlog_s - a.backlog_s).slice(0, 6);
    showEach(this.layers.labels, named, (each) => each.id, () => svg("text"), (node, each) => {
      const [from, to] = arcs.get(each.id);
      // The label is outside the ring if there is space, otherwise over the instance's bar.
      const [x, y] = point((from + to) / 2, endpoints.length <= LABELS ? LOAD_FROM + LOAD_MOST + 8 : LOAD_FROM + 12);
      const anchor = Math.abs(x) < 40 || endpoints.length > LABELS ? "middle" : x > 0 ? "start" : "end";
      setAttributes(node, { x, y: y + 4, "text-anchor": anchor });
      const name = each.id.length > NAME ? `…${each.id.slice(1 - NAME)}` : each.id;
      if (node.textContent !== name) node.textContent = name;
    });
  }

  /** Draws a decision's pair: a line from ring 1's candidate to ring 2's, with a dot at the chosen one. */
  showPair(decision) {
    const [ring1, ring2] = this.arcs;
    const ends = [];
    const [first, second] = decision?.pair ?? [];
    if (ring1.has(first)) ends.push({ id: first, at: middle(ring1.get(first), RING_1[0]) });
    if (ring2.has(second)) ends.push({ id: second, at: middle(ring2.get(second), RING_2[0]) });
    const shapes = [];
    if (ends.length === 2) {
      shapes.push({ key: "pair", tag: "path", d: `M${ends[0].at} Q0,0 ${ends[1].at}` });
    }
    if (decision?.chosen && !decision.pair.includes(decision.chosen) && ring1.has(decision.chosen)) {
      const at = middle(ring1.get(decision.chosen), RING_1[0]);
      shapes.push({ key: "elsewhere", tag: "path", d: `M0,0 L${at}`, class: "elsewhere" });
      ends.push({ id: decision.chosen, at });
    }
    for (const { id, at } of ends) {
      const chosen = id === decision.chosen;
      shapes.push({ key: `end-${id}`, tag: "circle", cx: at[0], cy: at[1], r: chosen ? 6 : 4, class: chosen ? "chosen" : "other" });
    }
    showEach(this.layers.chord, shapes, (each) => each.key, (each) => svg(each.tag), (node, each) => {
      const { key, tag, ...attributes } = each;
      setAttributes(node, attributes);
    });
  }
}

function loadOf(endpoint, slo) {
  if (endpoint.backlog_s > slo) return "late";
  return endpoint.backlog_s > slo / 2 ? "long" : "fine";
}

function describe(endpoints, onRing, slo) {
  if (!endpoints.length) return "The pool has no instances.";
  const off = endpoints.filter((each) => !onRing.includes(each));
  const words = [`${plural(onRing.length, "instance")} on the rings`];
  const [least, most] = [Math.min, Math.max].map((pick) => percent(pick(...onRing.map((each) => each.ring_1))));
  if (onRing.length > 1) words[0] += `, each with ${least === most ? least : `${least} to ${most}`} of the keys`;
  const busiest = onRing.reduce((a, b) => (b.backlog_s > (a?.backlog_s ?? 0) ? b : a), null);
  if (busiest) words.push(`most pending prefill at ${busiest.id}: ${seconds(busiest.backlog_s)}, SLO ${seconds(slo)}`);
  if (off.length) {
    const names = off.slice(0, 5).map((each) => `${each.id} (${each.state})`).join(", ");
    words.push(`not on the rings: ${names}${off.length > 5 ? ` and ${off.length - 5} more` : ""}`);
  }
  return `${words.join("; ")}.`;
}

function point(turn, radius) {
  const angle = (turn - 0.25) * 2 * Math.PI;
  return [Math.cos(angle) * radius, Math.sin(angle) * radius].map((each) => Math.round(each * 100) / 100);
}

function middle([from, to], radius) {
  return point((from + to) / 2, radius);
}

/** Leaves a gap at both ends: a share of the arc, at most 0.5 % of the circle. */
function inset([from, to], share) {
  const gap = Math.min((to - from) * share, 0.005);
  return [from + gap, to - gap];
}

/** A piece of a ring between two angles and two radii. */
function band(from, to, inner, outer) {
  const end = Math.min(to, from + 0.9999); // A full circle would end at its start, and draw nothing.
  const large = end - from > 0.5 ? 1 : 0;
  const [a, b, c, d] = [point(from, outer), point(end, outer), point(end, inner), point(from, inner)];
  return `M${a} A${outer},${outer} 0 ${large} 1 ${b} L${c} A${inner},${inner} 0 ${large} 0 ${d} Z`;
}
