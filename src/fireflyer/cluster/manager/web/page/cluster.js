// The cluster as a whole: how busy, how good, what was set.

import * as api from "./api.js";
import { utilisationPanel } from "./charts.js";
import { duration, el, percent, table } from "./dom.js";

export function clusterPage() {
  const cards = el("div.cards");
  const rest = el("div");
  const charts = utilisationPanel();
  async function refresh() {
    const found = await api.cluster();
    const card = (number, text) => el("div.card", {}, el("b", {}, number), el("span", {}, text));
    cards.replaceChildren(card(`${found.healthy} / ${found.nodes}`, "nodes healthy"), card(found.busy, "nodes busy"),
      card(percent(found.utilisation), "utilisation: allocated of healthy node-time"), card(percent(found.goodput), "goodput: productive of healthy node-time"),
      ...Object.entries(found.tasks).map(([name, count]) => card(count, `tasks ${name}`)));
    const { policy, limits, reservations, guaranteed_ns: guaranteed } = found.config;
    rest.replaceChildren(el("h3", {}, "Policy"), el("p", {}, `A run is not interrupted for ${duration(guaranteed)}. A task counts one priority more for each ${duration(policy.age_step_ns)} that it waits, and is submitted as if it had waited ${duration(policy.gang_age_ns)} for each doubling of its nodes.`),
      el("h3", {}, "Limits"), limits.length ? table(["For", "Name", "Group", "Priority", "Nodes"], limits.map((one) =>
        el("tr", {}, [one.kind, one.name || "each", one.node_group, one.priority ?? "any", one.nodes].map((text) => el("td", {}, text))))) : el("p.dim", {}, "None."),
      el("h3", {}, "Reservations and maintenance"), reservations.length ? table(["Name"], reservations.map((one) => el("tr", {}, el("td", {}, one.name)))) : el("p.dim", {}, "None."));
    await charts.refresh();
  }
  return { element: el("section", {}, el("h2", {}, "Cluster"), cards, charts.element, rest), refresh, live: true };
}
