// Which page is shown, who is logged in, and when to read again.

import * as api from "./api.js";
import { el } from "./dom.js";
import { clusterPage } from "./cluster.js";
import { restoreFocus, watchFocus } from "./focus.js";
import { helpDialog } from "./help.js";
import { nodesPage } from "./nodes.js";
import { submitPage } from "./submit.js";
import { taskPage, tasksPage } from "./tasks.js";
import { themeSwitch } from "./theme.js";
import { usersPage } from "./users.js";

const PAGES = [["tasks", "Tasks", "t"], ["nodes", "Nodes", "n"], ["cluster", "Cluster", "c"], ["users", "Users", "u"],
  ["submit", "Submit", "s"]];
const AGAIN_MS = 400;
const main = document.getElementById("main");
const nav = document.getElementById("nav");
const notice = document.getElementById("notice");
let me = null;
let page = null;
let pending = null;
let following = null;
const help = helpDialog([...PAGES.map(([, title, key]) => [key, title]), ["/", "Search"], ["Enter", "Open the row that has the focus"],
  ["?", "These keys"]]);

function route() {
  const [, name = "tasks", argument = ""] = location.hash.replace(/^#?/, "").split("/");
  const made = { tasks: argument ? () => taskPage(Number(argument), me) : () => tasksPage(me), nodes: () => nodesPage(me),
    cluster: clusterPage, users: usersPage, submit: () => submitPage() }[name];
  for (const link of nav.children) {
    if (link.dataset.page === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  page = (made || (() => tasksPage(me)))();
  main.replaceChildren(page.element);
  main.focus({ preventScroll: true });
  window.scrollTo(0, 0);
  refresh();
}

async function refresh() {
  pending = null;
  const shown = page;
  if (!shown?.refresh) return;
  try {
    await shown.refresh();
    restoreFocus(main);
    say("");
  } catch (error) {
    if (error.status === 401) return logInPage();
    say(error.message);
  }
}

// Many changes at once are one reading.
function soon() {
  pending ??= setTimeout(refresh, AGAIN_MS);
}

function say(text) {
  notice.textContent = text;
  notice.hidden = !text;
}

function logInPage(message = "") {
  following?.close();
  following = me = null;
  nav.hidden = true;
  document.getElementById("who").replaceChildren();
  const token = el("input", { type: "password", name: "token", autocomplete: "current-password", required: true });
  const problem = el("p.error", { role: "alert" }, message);
  const form = el("form.login", { onsubmit: async (event) => {
    event.preventDefault();
    try {
      await begin(await api.logIn(token.value.trim()));
    } catch (error) {
      problem.textContent = error.message;
    }
  } }, el("h2", {}, "Log in"), el("label", {}, "Your token", token), problem, el("button.main", {}, "Log in"),
  el("p.dim", {}, "An operator gives you a token. It is kept in this browser as a session of 12 hours."));
  page = null;
  main.replaceChildren(form);
  token.focus();
}

async function begin(found) {
  me = found;
  nav.hidden = false;
  nav.replaceChildren(...PAGES.map(([name, title]) => el("a", { href: `#/${name}`, "data-page": name }, title)));
  const out = el("button", { onclick: async () => { await api.logOut(); logInPage(); } }, "Log out");
  const keys = el("button", { "aria-label": "Keys", title: "Keys (?)", onclick: () => help.showModal() }, "?");
  document.getElementById("who").replaceChildren(`${me.user} `, out, keys);
  following = api.follow(soon, (connected) => say(connected ? "" : "The platform does not answer; trying again."));
  route();
}

document.addEventListener("keydown", (event) => {
  if (!me || help.open || event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
  const found = PAGES.find(([, , key]) => key === event.key);
  if (found) location.hash = `/${found[0]}`;
  if (event.key === "?") help.showModal();
  if (event.key === "/") {
    const search = main.querySelector("input[type=search]");
    if (search) { event.preventDefault(); search.focus(); }
  }
});
document.querySelector("header").append(themeSwitch());
watchFocus(main);
window.addEventListener("hashchange", () => me && route());
setInterval(() => { if (me && !document.hidden && page?.live) soon(); }, 5000);
api.session().then(begin, (error) => logInPage(error.status === 401 ? "" : error.message));
