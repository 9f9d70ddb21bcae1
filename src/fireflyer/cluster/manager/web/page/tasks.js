// The list of tasks, and one task with its runs on a time line.

import * as api from "./api.js";
import { clock, duration, el, linkRow, percent, state, table } from "./dom.js";

const PARTS = ["queue", "suspended", "platform", "start", "productive", "checkpoint", "lost", "restart", "release", "other", "unknown"];

export function tasksPage(me) {
  const mine = el("select", { "aria-label": "Whose tasks" }, el("option", { value: "" }, "of everybody"), el("option", { value: me.user }, "of mine"));
  const which = el("select", { "aria-label": "State" }, ["unfinished", "", "queued", "running", "suspended", "finished"].map((one) =>
    el("option", { value: one }, one || "all")));
  const search = el("input", { type: "search", placeholder: "name or number  (/)", "aria-label": "Search" });
  const list = el("div");
  const count = el("span.dim", { role: "status" });
  let found = [];
  function show() {
    const text = search.value.trim().toLowerCase();
    const rows = found.filter((one) => !text || one.name.toLowerCase().includes(text) || String(one.id) === text);
    count.textContent = `${rows.length} tasks`;
    list.replaceChildren(rows.length ? table(["#Task", "Name", "User", "State", "#Priority", "#Nodes", "#Runs", el("th.wide-only", {}, "Since")],
      rows.map((one) => linkRow(`/tasks/${one.id}`, el("td.number", {}, one.id), one.name, one.user, state(one.outcome || one.state),
        el("td.number", {}, one.priority), el("td.number", {}, one.nodes.length || one.least_nodes), el("td.number", {}, one.runs),
        el("td.wide-only", {}, duration(Date.now() * 1e6 - one.since_ns)))))
      : el("p.dim", {}, "No tasks. Submit one here, or with: ff submit train.py"));
  }
  async function refresh() {
    const query = { limit: 500 };
    if (mine.value) query.user = mine.value;
    if (which.value) query.state = which.value;
    found = (await api.tasks(query)).tasks;
    show();
  }
  mine.addEventListener("change", refresh);
  which.addEventListener("change", refresh);
  search.addEventListener("input", show);
  return { element: el("section", {}, el("h2", {}, "Tasks"), el("div.row", {}, which, mine, search, count), list), refresh, live: true };
}

export function taskPage(number, me) {
  const body = el("div");
  const said = el("p", { role: "status" });
  async function act(type, fields, question) {
    if (question && !window.confirm(question)) return;
    try {
      said.className = "dim";
      said.textContent = (await api.command(type, { task: number, ...fields })).text;
    } catch (error) {
      said.className = "error";
      said.textContent = error.message;
    }
    await refresh();
  }
  async function refresh() {
    const answer = await api.task(number);
    const { task, runs } = answer;
    const mayAct = task.state !== "finished" && (task.user === me.user || me.roles.length > 0);
    const priority = el("input", { type: "number", min: 0, max: 50, value: task.priority, "aria-label": "Priority" });
    const buttons = mayAct ? el("div.row", {},
      task.held ? el("button.main", { onclick: () => act("ResumeTask", {}) }, "Resume")
        : el("button", { onclick: () => act("SuspendTask", {}) }, "Suspend"),
      el("button.danger", { onclick: () => act("StopTask", {}, `Stop task ${number} for good?`) }, "Stop"),
      priority, el("button", { onclick: () => act("SetPriority", { priority: Number(priority.value) }) }, "Set priority")) : null;
    const parts = [el("h2", {}, `Task ${task.id} `, task.name), buttons, said, facts(answer), timeline(task, runs), account(task), runTable(runs)];
    body.replaceChildren(...parts.filter((part) => part !== null));
  }
  return { element: body, refresh, live: true };
}

function facts({ task, why: { text: why, earliest_ns: earliest } }) {
  const nodes = task.least_nodes === task.most_nodes ? task.least_nodes : `${task.least_nodes} to ${task.most_nodes}`;
  const program = task.spec?.program;
  const lines = [["State", el("span", {}, state(task.outcome || task.state), ` for ${duration(Date.now() * 1e6 - task.since_ns)}`)],
    ["Why", why], ["Starts", earliest ? `${clock(earliest)} at the latest` : null], ["User", task.user],
    ["Asks for", `${nodes} nodes of ${task.node_group}, priority ${task.priority}`], ["Nodes", task.nodes.join(" ") || null],
    ["Program", program ? [program.script, ...program.args].join(" ") : null], ["Submitted", clock(task.submitted_ns)],
    ["Exit", task.exit_code === null ? null : `${task.exit_code}: ${task.reason}`], ["Requeues", task.requeues || null],
    ["Whole-life state", task.whole_life || null], ["ETTR", task.ettr === null ? null : percent(task.ettr)]];
  return el("dl.facts", {}, lines.filter(([, text]) => text !== null && text !== "").map(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]));
}

function timeline(task, runs) {
  if (!runs.length) return null;
  const end = task.ended_ns || Date.now() * 1e6;
  const whole = Math.max(1, end - task.submitted_ns);
  const at = (ns) => `${(100 * (ns - task.submitted_ns)) / whole}%`;
  const bars = runs.map((run) => {
    const until = run.over_ns || run.ended_ns || end;
    const text = `run ${run.number} on ${run.nodes.length} nodes, ${duration(until - run.scheduled_ns)}: ${run.cause || run.state}`;
    const bar = el(`a.${run.cause || "now"}`, { href: `#/tasks/${task.id}`, title: text, "aria-label": text });
    bar.style.left = at(run.scheduled_ns);
    bar.style.width = `${(100 * (until - run.scheduled_ns)) / whole}%`;
    return bar;
  });
  return el("section", {}, el("h3", {}, "Runs over time"), el("div.time", { role: "group", "aria-label": `${runs.length} runs` }, bars),
    el("p.dim", {}, `${clock(task.submitted_ns)} to ${task.ended_ns ? clock(task.ended_ns) : "now"}`));
}

function account(task) {
  const parts = PARTS.map((name) => [name, task.account[`${name}_ns`] || 0]).filter(([, ns]) => ns > 0);
  const whole = parts.reduce((sum, [, ns]) => sum + ns, 0);
  if (!whole) return null;
  const bar = el("div.bar", { role: "img", "aria-label": "Where the time went" }, parts.map(([name, ns]) => {
    const part = el(`i.${name}`, { title: `${name} ${duration(ns)}` });
    part.style.width = `${(100 * ns) / whole}%`;
    return part;
  }));
  return el("section", {}, el("h3", {}, "Where the time went"), bar,
    el("p.dim", {}, `${duration(whole)}: ${parts.map(([name, ns]) => `${name} ${duration(ns)}`).join(", ")}`));
}

function runTable(runs) {
  if (!runs.length) return null;
  return el("section", {}, el("h3", {}, "Runs"), table(["#Run", "State", "Nodes", "Began", "For", "Ended by"], [...runs].reverse().map((run) =>
    el("tr", {}, el("td.number", {}, run.number), el("td", {}, run.state, run.step === null ? "" : ` (step ${run.step})`),
      el("td", {}, run.nodes.join(" ")), el("td", {}, clock(run.started_ns || run.scheduled_ns)),
      el("td", {}, duration((run.over_ns || run.ended_ns || Date.now() * 1e6) - run.scheduled_ns)),
      el("td.why", {}, run.cause ? `${run.cause}: ${run.end_reason}` : run.leave_reason || run.reason)))));
}
