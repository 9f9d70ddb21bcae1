// The list of tasks, with the reasons of those that wait.

import * as api from "./api.js";
import { duration, el, linkRow, many, state, table } from "./dom.js";

// The manager searches for each reason, so only the first ones are asked for, and not at each change.
const REASONS = 20;
const REASON_MS = 15_000;

export function tasksPage(me) {
  const mine = el("select", { "aria-label": "Whose tasks" }, el("option", { value: "" }, "of everybody"), el("option", { value: me.user }, "of mine"));
  const which = el("select", { "aria-label": "State" }, ["unfinished", "", "queued", "running", "suspended", "finished"].map((one) =>
    el("option", { value: one }, one || "all")));
  const search = el("input", { type: "search", placeholder: "name or number  (/)", "aria-label": "Search" });
  const list = el("div");
  const count = el("span.dim", { role: "status" });
  const reasons = reasonsOf();
  let found = [];
  function show() {
    const text = search.value.trim().toLowerCase();
    const rows = found.filter((one) => !text || one.name.toLowerCase().includes(text) || String(one.id) === text);
    count.textContent = many(rows.length, "task");
    list.replaceChildren(rows.length ? table(["#Task", "Name", "User", "State", "#Priority", "#Nodes", "#Runs", el("th.wide-only", {}, "Since"), el("th.wide-only", {}, "Reason")],
      rows.map((one) => linkRow(`/tasks/${one.id}`, el("td.number", {}, one.id), one.name, one.user, state(one.outcome || one.state),
        el("td.number", {}, one.priority), el("td.number", {}, one.nodes.length || one.least_nodes), el("td.number", {}, one.runs),
        el("td.wide-only", {}, duration(Date.now() * 1e6 - one.since_ns)), el("td.why.wide-only", { "data-reason": one.id }, waits(one) ? reasons.text(one.id) : ""))))
      : el("p.dim", {}, "No tasks. Submit one here, or with: ff submit train.py"));
  }
  async function refresh() {
    const query = { limit: 500 };
    if (mine.value) query.user = mine.value;
    if (which.value) query.state = which.value;
    found = (await api.tasks(query)).tasks;
    show();
    const waiting = [...found].reverse().filter(waits).map((one) => one.id);
    reasons.ask(waiting, (number, text) => list.querySelector(`[data-reason="${number}"]`)?.replaceChildren(text));
  }
  mine.addEventListener("change", refresh);
  which.addEventListener("change", refresh);
  search.addEventListener("input", show);
  return { element: el("section", {}, el("h2", {}, "Tasks"), el("div.row", {}, which, mine, search, count), list), refresh, live: true };
}

function waits(task) {
  return task.state === "queued" || (task.state === "suspended" && !task.held);
}

// Asks for the reasons of waiting tasks, one after the other.
function reasonsOf() {
  const known = new Map(); // task number → {text, asked_ms}
  let busy = false;
  return { text: (number) => known.get(number)?.text ?? "", ask: async (waiting, done) => {
    if (busy) return;
    busy = true;
    try {
      for (const number of waiting.slice(0, REASONS)) {
        if (Date.now() - (known.get(number)?.asked_ms ?? 0) < REASON_MS) continue;
        known.set(number, { text: known.get(number)?.text ?? "", asked_ms: Date.now() });
        const { why } = await api.task(number);
        known.set(number, { text: why.text, asked_ms: Date.now() });
        done(number, why.text);
      }
    } catch {
      // A task may be gone by now, and a lost connection is said elsewhere.
    } finally {
      busy = false;
    }
    for (const number of known.keys()) if (!waiting.includes(number)) known.delete(number);
  } };
}
