// Nodes by zone and leaf switch, coloured by state, and a table of them.

import * as api from "./api.js";
import { commands } from "./commands.js";
import { duration, el, many, state, table } from "./dom.js";

// A table of more rows is slow to draw and nobody reads it; the cells above it show all nodes.
const TABLE_ROWS = 200;
const MANY = 256;
const STATES = ["idle", "busy", "leaving", "suspect", "draining", "drained", "lost"];

export function nodesPage(me) {
  const search = el("input", { type: "search", placeholder: "name, label or state  (/)", "aria-label": "Search" });
  const places = el("div");
  const list = el("div");
  const count = el("span.dim", { role: "status" });
  const { said, act } = commands(() => refresh());
  let found = [];
  function buttons(node) {
    if (!me.roles.length) return "";
    if (node.drain_reason || /drain/.test(node.state)) return el("button", { "aria-label": `Resume ${node.name}`, onclick: () => act("ResumeNode", { node: node.name }) }, "Resume");
    return el("button", { "aria-label": `Drain ${node.name}`, onclick: () => {
      const reason = window.prompt(`Why is ${node.name} drained?`);
      if (reason) act("DrainNode", { node: node.name, reason });
    } }, "Drain");
  }
  function show() {
    const text = search.value.trim().toLowerCase();
    const rows = found.filter((node) => [node.name, node.state, node.zone, node.leaf, ...node.labels].join(" ").toLowerCase().includes(text));
    const listed = rows.slice(0, TABLE_ROWS);
    count.textContent = listed.length < rows.length
      ? `${rows.length} nodes; the table has the first ${listed.length}, search for others` : `${rows.length} nodes`;
    places.replaceChildren(...byPlace(rows));
    const leaves = found.some((node) => node.leaf);
    list.replaceChildren(table(["Node", "State", "#Task", "Group", "Zone", ...(leaves ? ["Leaf"] : []), "#GPUs", "Heard", ""], listed.map((node) =>
      el("tr", {}, el("td", {}, node.name), el("td", {}, state(node.state), node.drain_reason ? ` ${node.drain_reason}` : "", accused(node.accused)),
        el("td.number", {}, node.task === null ? "" : el("a", { href: `#/tasks/${node.task}` }, node.task)), el("td", {}, node.group),
        el("td", {}, node.zone || "–"), leaves ? el("td", {}, node.leaf || "–") : null, el("td.number", {}, node.inventory?.gpus.length ?? "–"),
        el("td", {}, node.silent_ns === null ? "never" : `${duration(node.silent_ns)} ago`), el("td", {}, buttons(node))))));
  }
  async function refresh() {
    found = await api.nodes();
    show();
  }
  search.addEventListener("input", show);
  const legend = el("p.legend", {}, STATES.map((name) => el("span", {}, el(`span.cell.${name}`), name)));
  return { element: el("section", {}, el("h2", {}, "Nodes"), el("div.row", {}, search, count), said, legend, places, list), refresh, live: true };
}

// How many runs that failed name the node as responsible; `ff node show` has them.
function accused(found) {
  if (!found) return "";
  const count = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;
  return el("span.error", {}, ` accused by ${count(found.runs, "run")} of ${count(found.users, "user")}`);
}

// Cells are no stops of the tab key: the table has the same links.
function byPlace(nodes) {
  const places = new Map();
  for (const node of nodes) {
    const key = [node.zone, node.leaf].filter(Boolean).join(", ") || "no zone";
    if (!places.has(key)) places.set(key, []);
    places.get(key).push(node);
  }
  const sorted = [...places].sort(([one], [other]) => one.localeCompare(other, undefined, { numeric: true }));
  return sorted.map(([place, there]) => el("section", {}, el("h3", {}, `${place}: ${many(there.length, "node")}`),
    el(nodes.length > MANY ? "div.grid.many" : "div.grid", {}, there.map((node) => {
      const text = `${node.name}: ${node.state}${node.task === null ? "" : `, task ${node.task}`}`;
      return el(`a.cell.${node.state}`, { href: node.task === null ? "#/nodes" : `#/tasks/${node.task}`, title: text, "aria-label": text, tabindex: -1 });
    }))));
}
