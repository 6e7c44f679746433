// TTFT and attainment over the last ten minutes, and the distribution of TTFT over the last five minutes. Each chart is
// an SVG of 100 x 100 units, stretched to the chart's size. Labels are HTML, so they are not stretched.

import { count, percent, seconds } from "./format.js";
import { el, setAttributes, setText, showEach, svg } from "./dom.js";

export class Charts {
  constructor(parent) {
    this.ttft = new Chart(parent, "TTFT, last 10 minutes", [["p50", "median"], ["p90", "90th percentile"]]);
    this.attainment = new Chart(parent, "Share of first tokens within the SLO, in intervals of 10 seconds", []);
    this.spread = new Chart(parent, "Distribution of TTFT, last 5 minutes", []);
  }

  show(pool) {
    const { history, slo } = pool;
    const span = (history.step_s * history.attainment.length) / 60;
    this.showTtft(history, slo.ttft_s, span);
    this.showAttainment(history, slo.attainment, span);
    this.showSpread(pool.ttfts, slo.ttft_s);
  }

  showTtft(history, slo, span) {
    const known = history.ttft_p90_s.filter((each) => each !== null);
    const top = Math.max(slo * 1.5, Math.min(Math.max(0, ...known) * 1.08, slo * 6));
    const y = (value) => 100 - (Math.min(value, top) / top) * 100;
    this.ttft.lines({ p90: line(history.ttft_p90_s, y), p50: line(history.ttft_p50_s, y) });
    this.ttft.mark(y(slo), `SLO ${seconds(slo)}`);
    this.ttft.scale(`${seconds(top)}`, "0", `${span} min ago`, "now");
    const last = known.length ? known[known.length - 1] : null;
    this.ttft.describe(last === null ? "No response of the pool started in the last 10 minutes." : `Latest 90th percentile ${seconds(last)}, maximum ${seconds(Math.max(...known))}; SLO ${seconds(slo)}.`);
  }

  showAttainment(history, goal, span) {
    const width = 100 / history.attainment.length;
    const bars = history.attainment.map((share, index) => ({ share, index })).filter(({ share }) => share !== null);
    this.attainment.bars(bars.map(({ share, index }) => ({
      key: index, x: index * width + width * 0.1, width: width * 0.8, height: Math.max(1.5, share * 100), kind: share >= goal ? "met" : "missed",
    })));
    this.attainment.mark(100 - goal * 100, `goal ${percent(goal)}`);
    this.attainment.scale("100%", "0", `${span} min ago`, "now");
    const missed = bars.filter(({ share }) => share < goal).length;
    this.attainment.describe(`Below the goal of ${percent(goal)} in ${missed} of ${bars.length} intervals of 10 s with first tokens.`);
  }

  showSpread({ bounds_s: bounds, counts }, slo) {
    const first = counts.findIndex((each) => each > 0);
    const most = Math.max(...counts);
    if (first < 0) {
      this.spread.bars([]);
      this.spread.markAt(null);
      this.spread.scale("", "", "", "");
      this.spread.describe("No response of the pool started in the last 5 minutes.");
      return;
    }
    // A bar extends from one bound to the next bound. The first and the last bar have the width of their neighbours.
    const low = (index) => bounds[index - 1] ?? bounds[0] / (bounds[1] / bounds[0]);
    const high = (index) => bounds[index] ?? bounds[bounds.length - 1] * (bounds[1] / bounds[0]);
    const last = counts.length - 1 - [...counts].reverse().findIndex((each) => each > 0);
    const from = Math.log(Math.min(low(first), slo / 2));
    const to = Math.log(Math.max(high(last), slo * 2));
    const x = (value) => ((Math.log(value) - from) / (to - from)) * 100;
    const bars = [];
    for (let index = first; index <= last; index += 1) {
      const height = (counts[index] / most) * 100;
      // A bar that contains the SLO is split at the SLO, because the counts do not show which of the bar's requests met
      // the SLO.
      const pieces = low(index) < slo && slo < high(index)
        ? [[low(index), slo, "met"], [slo, high(index), "missed"]]
        : [[low(index), high(index), high(index) <= slo ? "met" : "missed"]];
      for (const [a, b, kind] of pieces) {
        bars.push({ key: `${index}-${kind}`, x: x(a) + 0.1, width: x(b) - x(a) - 0.2, height, kind });
      }
    }
    this.spread.bars(bars);
    this.spread.markAt(x(slo), `SLO ${seconds(slo)}`);
    this.spread.scale(count(most), "0", seconds(Math.exp(from)), seconds(Math.exp(to)));
    this.spread.describe(`${count(counts.reduce((a, b) => a + b, 0))} first tokens, fastest ${seconds(low(first))}, slowest ${seconds(high(last))}.`);
  }
}

class Chart {
  constructor(parent, title, legend) {
    this.title = title;
    this.plane = svg("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img" });
    this.shapes = svg("g");
    this.line = svg("line", { class: "mark", x1: 0, x2: 100 });
    this.plane.append(this.shapes, this.line);
    this.top = el("span", { class: "top-label" });
    this.bottom = el("span", { class: "bottom-label" });
    this.label = el("span", { class: "series goal" });
    this.left = el("span");
    this.right = el("span");
    const keys = legend.map(([kind, words]) => el("span", { class: `series ${kind}` }, words));
    parent.append(el("figure", { class: "chart" },
      el("figcaption", {}, title, ...keys, this.label),
      el("div", { class: "plane", "aria-hidden": "true" }, this.top, this.bottom, this.plane),
      el("div", { class: "axis", "aria-hidden": "true" }, this.left, this.right),
      (this.words = el("p", { class: "hidden" }))));
  }

  lines(paths) {
    showEach(this.shapes, Object.entries(paths), ([kind]) => kind, ([kind]) => svg("path", { class: kind }), (node, [, d]) => setAttributes(node, { d }));
  }

  bars(bars) {
    showEach(this.shapes, bars, (each) => each.key, () => svg("rect"), (node, { x, width, height, kind }) => {
      setAttributes(node, { x, width: Math.max(0.1, width), y: 100 - height, height, class: kind });
    });
  }

  mark(y, text) {
    setAttributes(this.line, { x1: 0, x2: 100, y1: y, y2: y });
    setText(this.label, text);
  }

  markAt(x, text = "") {
    setAttributes(this.line, x === null ? { x1: 0, x2: 0, y1: 0, y2: 0 } : { x1: x, x2: x, y1: 0, y2: 100 });
    setText(this.label, text);
  }

  scale(top, bottom, left, right) {
    setText(this.top, top);
    setText(this.bottom, bottom);
    setText(this.left, left);
    setText(this.right, right);
  }

  describe(text) {
    setText(this.words, text);
  }
}

/** The path of a line with gaps where values are missing; a single point is drawn as a short dash. */
function line(values, y) {
  const step = 100 / (values.length - 1);
  let d = "";
  let drawing = false;
  values.forEach((value, index) => {
    if (value === null) drawing = false;
    else {
      const at = `${(index * step).toFixed(2)},${y(value).toFixed(2)}`;
      d += drawing ? `L${at}` : `M${at}h0.4`;
      drawing = true;
    }
  });
  return d;
}
