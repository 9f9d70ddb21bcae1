// Which page is shown, who is logged in, and when to read again.

import * as api from "./api.js";
import { el } from "./dom.js";
import { clusterPage } from "./cluster.js";
import { restoreFocus, watchFocus } from "./focus.js";
import { healthPage } from "./health.js";
import { helpDialog } from "./help.js";
import { logInForm } from "./login.js";
import { logsPage } from "./logs.js";
import { nodesPage } from "./nodes.js";
import { submitPage } from "./submit.js";
import { taskPage } from "./task.js";
import { tasksPage } from "./tasks.js";
import { themeSwitch } from "./theme.js";
import { usersPage } from "./users.js";

const PAGES = [["tasks", "Tasks", "t"], ["nodes", "Nodes", "n"], ["health", "Health", "h"], ["cluster", "Cluster", "c"], ["users", "Users", "u"],
  ["submit", "Submit", "s"]];
const AGAIN_MS = 400;
const ENDED = "Your session has ended. Log in again: you come back to this page, and what you typed is kept.";
const main = document.getElementById("main");
const nav = document.getElementById("nav");
const notice = document.getElementById("notice");
let me = null;
let page = null;
let place = ""; // of `page`
let pending = null;
let following = null;
let ending = null;
const help = helpDialog([...PAGES.map(([, title, key]) => [key, title]), ["/", "Search"], ["Enter", "Open the row that has the focus"],
  ["l", "Logs of the task"], ["f", "Follow the logs, or stop"], ["?", "These keys"]]);

function made() {
  const [, name = "tasks", argument = "", part = "", run = ""] = location.hash.replace(/^#?/, "").split("/");
  const number = Number(argument);
  const task = part === "logs" ? () => logsPage(number, run === "" ? null : Number(run)) : () => taskPage(number, me);
  const found = { tasks: argument ? task : () => tasksPage(me), nodes: () => nodesPage(me), health: () => healthPage(me), cluster: clusterPage, users: usersPage, submit: submitPage }[name];
  return (found ?? (() => tasksPage(me)))();
}

function route() {
  highlight();
  page?.leave?.();
  place = location.hash;
  page = made();
  main.replaceChildren(page.element);
  main.focus({ preventScroll: true });
  window.scrollTo(0, 0);
  refresh();
}

function highlight() {
  const [, name = "tasks"] = location.hash.replace(/^#?/, "").split("/");
  for (const link of nav.children) {
    if (link.dataset.page === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

async function refresh() {
  pending = null;
  const shown = page;
  if (!me || !shown?.refresh) return;
  try {
    await shown.refresh();
    if (me) restoreFocus(main);
    if (me) say("");
  } catch (error) {
    if (me && shown === page) say(error.message);
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

function outside() {
  following?.close();
  clearTimeout(ending);
  following = me = null;
  nav.hidden = true;
  help.close();
  document.getElementById("who").replaceChildren();
}

function logInPage(message = "") {
  outside();
  page?.leave?.();
  page = null;
  const form = logInForm(message, begin);
  main.replaceChildren(form.element);
  form.focus();
}

// The page is taken out of the document, not thrown away: the same user finds it as it was.
function askAgain() {
  if (!me) return;
  const before = me.user;
  outside();
  say(ENDED);
  const form = logInForm("", (found) => begin(found, found.user === before && location.hash === place ? page : null));
  main.replaceChildren(form.element);
  form.focus();
}

function begin(found, kept = null) {
  me = found;
  nav.hidden = false;
  nav.replaceChildren(...PAGES.map(([name, title]) => el("a", { href: `#/${name}`, "data-page": name }, title)));
  const out = el("button", { onclick: async () => { await api.logOut().catch(() => null); logInPage(); } }, "Log out");
  const keys = el("button", { "aria-label": "Keys", title: "Keys (?)", onclick: () => help.showModal() }, "?");
  document.getElementById("who").replaceChildren(`${me.user} `, out, keys);
  following = api.follow(soon, (connected) => say(connected ? "" : "The platform does not answer; trying again."));
  if (me.expires_s) ending = setTimeout(() => api.session().catch((error) => error.status === 401 && askAgain()), 1000 * (me.expires_s + 1) - Date.now());
  say("");
  if (!kept) return route();
  highlight();
  main.replaceChildren(kept.element);
  main.focus({ preventScroll: true });
  kept.resume?.();
  refresh();
}

document.addEventListener("keydown", (event) => {
  if (!me || help.open || event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
  const found = PAGES.find(([, , key]) => key === event.key);
  if (found) location.hash = `/${found[0]}`;
  else page?.key?.(event.key);
  if (event.key === "?") help.showModal();
  if (event.key === "/") {
    const search = main.querySelector("input[type=search]");
    if (search) { event.preventDefault(); search.focus(); }
  }
});
document.querySelector("header").append(themeSwitch());
watchFocus(main);
api.whenExpired(askAgain);
window.addEventListener("hashchange", () => me && route());
setInterval(() => { if (me && !document.hidden && page?.live) soon(); }, 5000);
api.session().then((found) => begin(found), (error) => logInPage(error.status === 401 ? "" : error.message));
