// The last decisions as text, newest first, and the share of each rule. The list pauses while it has the pointer or
// focus.

import { count, percent, plural, seconds, when } from "./format.js";
import { el, setAttributes, setText, showEach } from "./dom.js";

const SHOWN = 12;

export class Decisions {
  constructor({ list, rules, pause, note }, onPoint) {
    this.list = list;
    this.rules = rules;
    this.note = note;
    this.pause = pause;
    this.paused = false;
    this.pointed = false;
    this.focused = false;
    this.reasons = new Map();
    pause.addEventListener("click", () => {
      this.paused = !this.paused;
      pause.setAttribute("aria-pressed", String(this.paused));
      setText(pause, this.paused ? "Resume" : "Pause");
      this.tell();
    });
    const point = (event) => onPoint(event.target.closest("li")?.decision ?? null);
    const read = (how, reading) => {
      this[how] = reading;
      if (!this.reading) onPoint(null);
      this.tell();
    };
    list.addEventListener("pointerenter", () => read("pointed", true));
    list.addEventListener("pointerleave", () => read("pointed", false));
    list.addEventListener("pointerover", point);
    // The keyboard focus has the same effect, item by item. A click also moves the focus, but does not pause the list.
    list.addEventListener("focusin", (event) => {
      if (!event.target.matches(":focus-visible")) return;
      read("focused", true);
      point(event);
    });
    list.addEventListener("focusout", (event) => {
      if (!list.contains(event.relatedTarget)) read("focused", false);
    });
  }

  get reading() {
    return this.pointed || this.focused;
  }

  /** Shows the newest decisions that name one of `marked`; all if it is null. */
  show(pool, marked) {
    for (const each of pool.decisions) if (each.rule) this.reasons.set(each.rule, each.reason);
    this.showRules(pool.rules);
    if (this.paused || this.reading) return;
    const admitted = pool.decisions.filter((each) => !marked || names(each).some((id) => marked.has(id)));
    showEach(this.list, admitted.slice(0, SHOWN), (each) => each.number, makeItem, bringUpToDate);
    this.tell(admitted.length);
  }

  /** Removes the decisions of the previous pool. */
  clear() {
    this.list.replaceChildren();
    this.pointed = false;
    this.focused = false;
  }

  tell(number = this.list.children.length) {
    const still = this.paused ? "paused" : this.reading ? "paused while the pointer or the focus is on the list" : "newest first";
    setText(this.note, number ? still : "none yet");
  }

  showRules(rules) {
    const total = Object.values(rules).reduce((a, b) => a + b, 0);
    const sorted = Object.entries(rules).sort((a, b) => b[1] - a[1]);
    showEach(this.rules, sorted, ([rule]) => rule, ([rule]) => el("li", {}, el("b", {}, rule), el("span")), (node, [rule, number]) => {
      setText(node.lastChild, ` ${percent(number / total)} (${count(number)})`);
      node.title = this.reasons.has(rule) ? `because ${this.reasons.get(rule)}` : "";
    });
  }
}

function names(each) {
  return each.refused ? [] : [each.chosen, ...each.pair];
}

function bringUpToDate(node, each) {
  // A restarted router numbers decisions from 0 again, so the number of a shown decision may now belong to another
  // decision.
  if (node.decision && Math.abs(node.decision.at - each.at) > 0.5) {
    const other = makeItem(each);
    setAttributes(node, { class: other.getAttribute("class") });
    node.replaceChildren(...other.childNodes);
  }
  node.decision = each;
}

function makeItem(each) {
  const time = el("time", { datetime: new Date(each.at * 1000).toISOString() }, when(each.at));
  if (each.refused) return el("li", { class: "refused", tabindex: 0 }, time, el("p", {}, el("b", {}, "Rejected"), ` (${each.refused}): ${each.reason}.`));
  const cached = each.prompt_tokens ? `, ${percent(each.matched_tokens / each.prompt_tokens)} of it cached there` : "";
  return el("li", { tabindex: 0 }, time,
    el("p", {}, el("b", {}, each.chosen), ` because ${each.reason} `, el("span", { class: "rule" }, each.rule)),
    el("p", { class: "muted" }, pairInWords(each), `Prompt of ${plural(each.prompt_tokens, "token")}${cached}; first token expected in ${seconds(each.ttft_s)}.`));
}

function pairInWords(each) {
  const candidates = new Map(each.candidates.map((one) => [one.id, one]));
  const words = each.pair.map((id) => {
    const one = candidates.get(id);
    return one ? `${id} (${count(one.matched_tokens)} cached, ${seconds(one.ttft_s)})` : id;
  });
  return words.length ? `Pair: ${words.join(" and ")}. ` : "";
}
