// One task: why it is in its state, its runs over time, and where its time went.

import * as api from "./api.js";
import { clock, duration, el, many, percent, state, table } from "./dom.js";
import { timeline } from "./timeline.js";

const PARTS = ["queue", "suspended", "platform", "start", "productive", "checkpoint", "lost", "restart", "release", "other", "unknown"];

export function taskPage(number, me) {
  const said = el("p", { role: "status" });
  let typed = false;
  const priority = el("input", { type: "number", min: 0, max: 50, "aria-label": "Priority", oninput: () => { typed = true; } });
  // What is typed into stays in the page when the rest is drawn again, with its caret and its selection.
  const change = el("span.contents", { hidden: true }, priority, el("button", { onclick: setPriority }, "Set priority"));
  const [heading, actions, rest] = [el("h2"), el("span.contents"), el("div")];
  const body = el("div", {}, heading, el("div.row", {}, actions, change), said, rest);
  async function setPriority() {
    typed = false;
    await act("SetPriority", { priority: Number(priority.value) });
  }
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
    const buttons = !mayAct ? [] : [
      task.held ? el("button.main", { onclick: () => act("ResumeTask", {}) }, "Resume")
        : el("button", { onclick: () => act("SuspendTask", {}) }, "Suspend"),
      el("button.danger", { onclick: () => act("StopTask", {}, `Stop task ${number} for good?`) }, "Stop")];
    const logs = mayRead(task, me) ? el("a.button", { href: `#/tasks/${number}/logs` }, "Logs") : null;
    heading.replaceChildren(`Task ${task.id} `, task.name);
    actions.replaceChildren(...[logs, ...buttons].filter((part) => part !== null));
    change.hidden = !mayAct;
    if (!typed) priority.value = task.priority;
    const parts = [facts(answer), timeline(task, runs), account(task), runTable(runs, mayRead(task, me))];
    rest.replaceChildren(...parts.filter((part) => part !== null));
  }
  return { element: body, refresh, live: true, key: (key) => {
    if (key === "l") location.hash = `/tasks/${number}/logs`;
  } };
}

// The manager decides; this only leaves out what it would refuse.
function mayRead(task, me) {
  return task.user === me.user || me.roles.length > 0;
}

function facts({ task, why: { text: why, earliest_ns: earliest } }) {
  const nodes = task.least_nodes === task.most_nodes ? many(task.least_nodes, "node") : `${task.least_nodes} to ${task.most_nodes} nodes`;
  const program = task.spec?.program;
  const lines = [["State", el("span", {}, state(task.outcome || task.state), ` for ${duration(Date.now() * 1e6 - task.since_ns)}`)],
    ["Why", why], ["Starts", earliest ? `${clock(earliest)} at the latest` : null], ["User", task.user],
    ["Asks for", `${nodes} of ${task.node_group}, priority ${task.priority}`], ["Nodes", task.nodes.join(" ") || null],
    ["Program", program ? [program.script, ...program.args].join(" ") : null], ["Submitted", clock(task.submitted_ns)],
    ["Exit", task.exit_code === null ? null : `${task.exit_code}: ${task.reason}`], ["Requeues", task.requeues || null],
    ["Whole-life state", task.whole_life || null], ["ETTR", task.ettr === null ? null : percent(task.ettr)]];
  return el("dl.facts", {}, lines.filter(([, text]) => text !== null && text !== "").map(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]));
}

function account(task) {
  const parts = PARTS.map((name) => [name, task.account[`${name}_ns`] || 0]).filter(([, ns]) => ns > 0);
  const whole = parts.reduce((sum, [, ns]) => sum + ns, 0);
  if (!whole) return null;
  const bar = el("div.bar", { role: "img", "aria-label": "Where the time went" }, parts.map(([name, ns]) => {
    const part = el(`i.part.${name}`, { title: `${name} ${duration(ns)}` });
    part.style.width = `${(100 * ns) / whole}%`;
    return part;
  }));
  return el("section", {}, el("h3", {}, "Where the time went"), bar,
    el("p.legend", {}, `${duration(whole)}:`, parts.map(([name, ns]) => el("span", {}, el(`i.key.part.${name}`), `${name} ${duration(ns)}`))));
}

function runTable(runs, readable) {
  if (!runs.length) return null;
  const logs = (run) => (readable ? el("a", { href: `#/tasks/${run.task}/logs/${run.number}`, "aria-label": `Logs of run ${run.number}` }, "logs") : "");
  return el("section", {}, el("h3", {}, "Runs"), table(["#Run", "", "State", "Nodes", "Began", "For", "Reason"], [...runs].reverse().map((run) =>
    el("tr", {}, el("td.number", {}, run.number), el("td", {}, logs(run)), el("td", {}, run.state, run.step === null ? "" : ` (step ${run.step})`),
      el("td", {}, run.nodes.join(" ")), el("td.together", {}, clock(run.started_ns || run.scheduled_ns)),
      el("td.together", {}, duration((run.over_ns || run.ended_ns || Date.now() * 1e6) - run.scheduled_ns)),
      el("td.why", {}, reasonOf(run))))));
}

function reasonOf(run) {
  if (!run.cause) return run.leave_reason || run.reason;
  return run.end_reason && run.end_reason !== run.cause ? `${run.cause}: ${run.end_reason}` : run.cause;
}
