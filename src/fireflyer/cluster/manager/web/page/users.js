// Users: what they have now, and what they have used.

import * as api from "./api.js";
import { el, table } from "./dom.js";

export function usersPage() {
  const list = el("div");
  async function refresh() {
    const found = await api.users();
    list.replaceChildren(found.length ? table(["User", "#Nodes now", "#Unfinished tasks", "#Node-hours in the window", "#Share (nodes)"], found.map((one) =>
      el("tr", {}, el("td", {}, one.user), ...[one.nodes, one.unfinished, (one.node_seconds / 3600).toFixed(1), one.share].map((text) => el("td.number", {}, text))))) : el("p.dim", {}, "Nobody has submitted anything yet."));
  }
  return { element: el("section", {}, el("h2", {}, "Users"), list), refresh, live: true };
}
