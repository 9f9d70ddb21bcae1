// The keys that the page knows.

import { el } from "./dom.js";

export function helpDialog(keys) {
  const close = el("button", { onclick: () => dialog.close() }, "Close");
  const dialog = el("dialog", { "aria-label": "Keys" }, el("h2", {}, "Keys"),
    el("dl.facts", {}, keys.map(([key, text]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, text)])), close);
  document.body.append(dialog);
  return dialog;
}
