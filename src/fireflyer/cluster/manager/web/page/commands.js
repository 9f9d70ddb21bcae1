// Commands of operators: each says below the heading what came of it, and what is shown is read again.

import * as api from "./api.js";
import { el } from "./dom.js";

// `said` is the element with the answer; `act` sends a command.
export function commands(refresh) {
  const said = el("p", { role: "status" });
  async function act(type, fields) {
    try {
      said.className = "dim";
      said.textContent = (await api.command(type, fields)).text;
    } catch (error) {
      said.className = "error";
      said.textContent = error.message;
    }
    await refresh();
  }
  return { said, act };
}
