// The table of instances: sorted by any column, filtered by name or state. The script keeps rows and updates their
// numbers.

import { count, percent, seconds, short } from "./format.js";
import { el, setAttributes, setText, showEach } from "./dom.js";

const byName = new Intl.Collator("en", { numeric: true }).compare;

// Sort field, title, description, and text of a cell.
const COLUMNS = [
  ["id", "Instance", "Id of the instance", (each) => each.id],
  ["state", "State", "State of the instance: Joining, Active, Draining, or Suspended after failures", (each) => (each.state === "Joining" ? `Joining (${each.weight}%)` : each.state)],
  ["ring_1", "Share", "Share of the keys on ring 1 that map to the instance", (each) => percent(each.ring_1)],
  ["in_flight", "In flight", "Number of requests in flight at the instance", (each) => count(each.in_flight)],
  ["held", "Queued", "Number of requests that wait in this router for the instance", (each) => count(each.held)],
  ["backlog_s", "Pending prefill", "Estimated time to prefill the pending prompt tokens, and the number of tokens", (each) => `${seconds(each.backlog_s)} (${short(each.pending_tokens)})`],
  ["requests", "Requests", "Number of requests sent to the instance in the last 5 minutes", (each) => count(each.requests)],
  ["hit_predicted", "Hit rate", "Share of prompt tokens found in the cache in the last 5 minutes: predicted by the router / measured by the engine", (each) => `${percent(each.hit_predicted)} / ${percent(each.hit_measured)}`],
  ["attainment", "Within SLO", "Share of first tokens within the SLO in the last 5 minutes", (each) => percent(each.attainment)],
  ["speed", "Tokens/s", "Measured prefill speed in tokens per second", (each) => short(each.speed)],
  ["engine", "Engine", "Version of the instance's engine, as the engine reports it; \"unknown\" if it does not answer", (each) => each.engine],
  ["events", "KV events", "State of the KV events that the instance's engine publishes; \"Live\" if the router knows all of them", (each) => each.events],
  ["failed", "Failed", "Number of requests that failed on the instance in the last 5 minutes", (each) => count(each.failed)],
];
const TEXTS = new Set(["id", "state", "engine", "events"]);
const ENGINE = COLUMNS.findIndex(([field]) => field === "engine");
const EVENTS = COLUMNS.findIndex(([field]) => field === "events");

export class Instances {
  constructor(table, filter, troubled, shown, onChange) {
    this.body = table.tBodies[0];
    this.shown = shown;
    this.filter = filter;
    this.troubled = troubled;
    this.sort = { field: "id", descending: false };
    this.heads = COLUMNS.map(([field, title, meaning]) => this.head(field, title, meaning, onChange));
    table.tHead.rows[0].append(...this.heads);
    filter.addEventListener("input", onChange);
    troubled.addEventListener("change", onChange);
  }

  head(field, title, meaning, onChange) {
    const button = el("button", { type: "button", title: meaning }, title);
    const cell = el("th", { scope: "col", class: TEXTS.has(field) ? null : "number" }, button);
    button.addEventListener("click", () => {
      const same = this.sort.field === field;
      // Numbers sort descending first, names ascending.
      this.sort = { field, descending: same ? !this.sort.descending : !TEXTS.has(field) };
      onChange();
    });
    return cell;
  }

  /** The ids that match the filter, or null without a filter. */
  marked(endpoints, pool) {
    const text = this.filter.value.trim().toLowerCase();
    if (!text && !this.troubled.checked) return null;
    return new Set(endpoints.filter((each) => this.admits(each, text, pool)).map((each) => each.id));
  }

  admits(each, text, pool) {
    const matches = each.id.toLowerCase().includes(text) || each.state.toLowerCase().includes(text);
    return matches && (!this.troubled.checked || isTroubled(each, pool));
  }

  show(endpoints, pool, marked) {
    const rows = endpoints.filter((each) => !marked || marked.has(each.id)).sort((a, b) => this.compare(a, b));
    // Most pools have no KV events.
    const hidden = endpoints.some((each) => each.events) ? null : "";
    setAttributes(this.heads[EVENTS], { hidden });
    COLUMNS.forEach(([field], index) => {
      const sorted = field === this.sort.field ? (this.sort.descending ? "descending" : "ascending") : null;
      setAttributes(this.heads[index], { "aria-sort": sorted });
    });
    showEach(this.body, rows, (each) => each.id, makeRow, (row, each) => {
      COLUMNS.forEach(([, , , text], index) => setText(row.cells[index].firstChild, text(each)));
      setAttributes(row, { "data-state": each.state, "data-troubled": isTroubled(each, pool) ? "" : null });
      markProblem(row.cells[ENGINE], each.engine_problem);
      markProblem(row.cells[EVENTS], each.events_problem);
      setAttributes(row.cells[EVENTS], { hidden });
      const late = each.backlog_s / pool.slo.ttft_s;
      const cell = row.cells[5];
      cell.dataset.load = late > 1 ? "late" : late > 0.5 ? "long" : "fine";
      cell.style.setProperty("--load", `${Math.min(100, late * 100).toFixed(1)}%`);
    });
    setText(this.shown, rows.length === endpoints.length ? `${endpoints.length}` : `${rows.length} of ${endpoints.length}`);
  }

  compare(a, b) {
    const { field, descending } = this.sort;
    const order = TEXTS.has(field) ? byName(a[field], b[field]) : (a[field] ?? -1) - (b[field] ?? -1);
    return (descending ? -order : order) || byName(a.id, b.id);
  }
}

/** Whether the instance has a problem: suspended, failing, late or overloaded. */
function isTroubled(each, pool) {
  const late = each.attainment !== null && each.attainment < pool.slo.attainment;
  return each.state === "Suspended" || each.failed > 0 || late || each.backlog_s > pool.slo.ttft_s;
}

/** Shows a problem of the instance's engine as the tooltip of a cell. */
function markProblem(cell, problem) {
  setAttributes(cell, { title: problem || null, "data-problem": problem ? "" : null });
}

function makeRow() {
  const cells = COLUMNS.map(([field]) =>
    field === "id" ? el("th", { scope: "row" }, "") : el("td", { class: TEXTS.has(field) ? null : "number" }, ""));
  for (const cell of cells) cell.append(document.createTextNode(""));
  return el("tr", {}, ...cells);
}
