// The form that asks for a token.

import * as api from "./api.js";
import { el } from "./dom.js";

export function logInForm(message, done) {
  const token = el("input", { type: "password", name: "token", autocomplete: "current-password", required: true });
  const problem = el("p.error", { role: "alert" }, message);
  const element = el("form.login", { onsubmit: async (event) => {
    event.preventDefault();
    let found;
    try {
      found = await api.logIn(token.value.trim());
    } catch (error) {
      problem.textContent = error.message;
      return;
    }
    done(found);
  } }, el("h2", {}, "Log in"), el("label", {}, "Your token", token), problem, el("button.main", {}, "Log in"),
  el("p.dim", {}, "An operator gives you a token. It is kept in this browser as a session of 12 hours."));
  return { element, focus: () => token.focus() };
}
