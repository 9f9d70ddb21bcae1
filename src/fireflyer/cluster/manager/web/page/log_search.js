// A search in logs: the manager searches, the page shows where.

import * as api from "./api.js";
import { el, many } from "./dom.js";
import { visible } from "./log_lines.js";

const MAX_RESULTS = 1000;

// `scope()` answers {run, rank}, null for all; `open(found)` shows a line; `changed(text)`: what is searched now.
export function searchPanel(task, { scope, open, changed }) {
  const input = el("input", { type: "search", name: "text", placeholder: "text  (/)", maxlength: 200, "aria-label": "Search in the logs" });
  const list = el("ol.found");
  const said = el("p.dim", { role: "status" });
  const more = el("button", { type: "button", onclick: () => read() }, "Search on");
  const close = el("button", { type: "button", onclick: () => clear() }, "Close");
  const results = el("section.results", { "aria-label": "Found lines", hidden: true }, el("div.row", {}, said, more, close), list);
  let asked = null;

  function clear() {
    asked = null;
    results.hidden = true;
    list.replaceChildren();
    changed("");
  }

  async function read() {
    const now = asked;
    more.hidden = true;
    said.textContent = "Searching.";
    try {
      const { lines, next } = await api.searchLogs(task, { ...now.query, after: now.next });
      if (asked !== now) return;
      now.next = next;
      list.append(...lines.map(item));
      const count = list.childElementCount;
      const full = count >= MAX_RESULTS;
      said.textContent = `${many(count, "line")} found${next ? " so far" : ""}${next && full ? "; search for something rarer" : ""}.`;
      more.hidden = !next || full;
    } catch (error) {
      if (asked === now) said.textContent = error.message;
    }
  }

  function item(found) {
    const place = `run ${found.run}${found.attempt ? `, attempt ${found.attempt}` : ""}, rank ${found.rank}`;
    return el("li", {}, el("button", { type: "button", onclick: () => open(found) }, el("span.from", {}, place), visible(found.line)));
  }

  const form = el("form.search", { role: "search", onsubmit: (event) => {
    event.preventDefault();
    const text = input.value;
    if (!text) return clear();
    const { run, rank } = scope();
    asked = { query: { text, ...(run === null ? {} : { run }), ...(rank === null ? {} : { rank }) }, next: "" };
    list.replaceChildren();
    results.hidden = false;
    changed(text);
    read();
  } }, input, el("button", {}, "Search"));
  return { form, results };
}
