// Nodes that their checks have found faulty or warn of: why, what is to be done next, and what was done.

import * as api from "./api.js";
import { commands } from "./commands.js";
import { clock, duration, el, many, state, table } from "./dom.js";

// Nodes in service, or about to be.
const IN_SERVICE = ["healthy", "probation", "returned"];
const REMEDIES = ["reset", "reboot", "field diagnosis", "rma"];
const HOLDS = { breaker: "not drained: as many nodes are out as the policy allows", leaf: "not drained: many links of its leaf switch have failed",
  user: "not drained: a user can have caused it; checked again when the run is over", unconfirmed: "a check came to no result" };

export function healthPage(me) {
  const cards = el("div.cards");
  const list = el("div");
  const repair = el("div");
  const { said, act } = commands(() => refresh());
  let asked = null;
  function record(node) {
    const remedy = window.prompt(`What was done to ${node}? One of: ${REMEDIES.join(", ")}`);
    if (remedy) act("RecordRepair", { node, remedy: remedy.trim().toLowerCase() });
  }
  function buttons(node) {
    const open = el("button", { "aria-label": `Repairs of ${node.name}`, onclick: () => { asked = node.name; refresh(); } }, "Repairs");
    if (!me.roles.length || IN_SERVICE.includes(node.health.state)) return open;
    return el("span.row", {}, open, el("button", { "aria-label": `Record a repair of ${node.name}`, onclick: () => record(node.name) }, "Repaired"),
      el("button", { "aria-label": `Test ${node.name} and return it`, onclick: () => act("ReturnNode", { node: node.name }) }, "Return"));
  }
  async function refresh() {
    const nodes = await api.nodes();
    const counts = new Map();
    for (const node of nodes) counts.set(node.health?.state ?? "healthy", (counts.get(node.health?.state ?? "healthy") ?? 0) + 1);
    cards.replaceChildren(...[...counts].map(([name, count]) => el("div.card", {}, el("b", {}, count), el("span", {}, name))));
    const found = nodes.filter((node) => node.health && (node.health.state !== "healthy" || node.health.warnings.length));
    found.sort((one, other) => IN_SERVICE.includes(one.health.state) - IN_SERVICE.includes(other.health.state) || other.health.since_ns - one.health.since_ns);
    list.replaceChildren(found.length ? table(["Node", "State", "Since", "Why, and what is next", "#Faults of the part", "#Task", ""], found.map((node) =>
      el("tr", {}, el("td", {}, node.name), el("td", {}, state(node.health.state)), el("td", {}, clock(node.health.since_ns)),
        el("td.why", {}, node.health.reason, node.health.warnings.map((one) => el("div", {}, `Warning: ${one}`)), HOLDS[node.health.hold] ? el("div.error", {}, HOLDS[node.health.hold]) : null,
          node.health.until_ns ? el("div", {}, `at least until ${clock(node.health.until_ns)}`) : null),
        el("td.number", {}, node.health.faults), el("td.number", {}, node.task === null ? "" : el("a", { href: `#/tasks/${node.task}` }, node.task)),
        el("td", {}, buttons(node)))))
      : el("p.dim", {}, "No node is faulty, or this cluster does not check its nodes: [health] in the configuration of its managers."));
    repair.replaceChildren(...(asked === null ? [] : repairs(await api.node(asked))));
  }
  return { element: el("section", {}, el("h2", {}, "Health"), cards, said, list, repair), refresh, live: true };
}

// The ticket of the repair that is under way, or was the last one.
function repairs(node) {
  const ticket = node.health?.ticket;
  const heading = el("h3", {}, `Repairs of ${node.name}`);
  if (!ticket) return [heading, el("p.dim", {}, "None is under way.")];
  const { fault } = ticket;
  const took = ticket.closed_ns === null ? "" : `, closed by ${ticket.closed_by} after ${duration(ticket.closed_ns - ticket.opened_ns)}`;
  const at = [fault.check, fault.part].filter(Boolean).join(" ");
  return [heading, el("dl.facts", {}, el("dt", {}, `Ticket ${ticket.id}`), el("dd", {}, `opened by ${ticket.opened_by} at ${clock(ticket.opened_ns)}${took}`),
    el("dt", {}, "Fault"), el("dd", {}, `${at}: ${fault.words}`), fault.serial ? [el("dt", {}, "Serial number"), el("dd", {}, fault.serial)] : null),
  el("p.dim", {}, many(ticket.actions.length, "action")),
  table(["When", "Who", "What", ""], ticket.actions.map((one) =>
    el("tr", {}, el("td", {}, clock(one.at_ns)), el("td", {}, one.by), el("td", {}, one.what), el("td.why", {}, one.words))))];
}
