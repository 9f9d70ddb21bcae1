// A form for a task whose directory is on every node.

import * as api from "./api.js";
import { el } from "./dom.js";

export function submitPage() {
  const field = (name, title, attributes) => [name, el("label", {}, title, el("input", { name, ...attributes }))];
  const fields = [field("name", "Name", { required: true, pattern: "[A-Za-z0-9][A-Za-z0-9._\\-]{0,79}" }),
    field("script", "Script", { required: true, placeholder: "train.py" }), field("workdir", "Working directory, on the nodes", { required: true, placeholder: "/shared/me" }),
    field("nodes", "Nodes", { type: "number", min: 1, value: 1 }), field("ranks", "Ranks per node", { type: "number", min: 1, value: 1 }),
    field("priority", "Priority (0 to 50)", { type: "number", min: 0, max: 50, value: 10 }), field("hours", "At most so many hours (empty: no limit)", { type: "number", min: 0, step: "any" }),
    field("group", "Group of nodes", { value: "default", required: true })];
  const args = el("label.wide", {}, "Arguments, one on each line", el("textarea", { name: "args", rows: 3 }));
  const problem = el("p.error.wide", { role: "alert" });
  const form = el("form.submit", { onsubmit: async (event) => {
    event.preventDefault();
    const given = Object.fromEntries(new FormData(form));
    const spec = { name: given.name, least_nodes: Number(given.nodes), most_nodes: Number(given.nodes), priority: Number(given.priority), node_group: given.group,
      time_ns: given.hours ? Math.round(Number(given.hours) * 3600) * 1e9 : null,
      program: { script: given.script, workdir: given.workdir, ranks_per_node: Number(given.ranks), args: given.args.split("\n").filter(Boolean) } };
    try {
      location.hash = `/tasks/${(await api.submit([spec])).tasks[0]}`;
    } catch (error) {
      problem.textContent = error.message;
    }
  } }, fields.map(([, element]) => element), args, problem, el("div.wide", {}, el("button.main", {}, "Submit")));
  return { element: el("section", {}, el("h2", {}, "Submit a task"), form), refresh: null, live: false };
}
