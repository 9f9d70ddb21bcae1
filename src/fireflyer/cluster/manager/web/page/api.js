// The HTTP API with the session's cookie; what changes something carries the session's csrf value.

const ROOT = "/api/v1";
const PAGE_ROWS = 1000;
const LONGEST_PAUSE_MS = 15_000;
let csrf = "";
let expired = () => {};

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Called when a request finds that the session has ended.
export function whenExpired(call) {
  expired = call;
}

async function ask(method, path, body, headers = {}) {
  return (await answer(method, path, { body, headers })).json().catch(() => null);
}

// Raises `Refused` for every status but 200 to 299; 0 where there was none.
async function answer(method, path, { body, headers = {}, signal }) {
  let response;
  try {
    response = await fetch(ROOT + path, {
      method,
      signal,
      credentials: "same-origin",
      headers: { Accept: "application/json", ...(body === undefined ? {} : { "Content-Type": "application/json" }),
        ...(method === "GET" ? {} : { "X-FF-CSRF": csrf }), ...headers },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch {
    throw new Refused(0, "The platform cannot be reached.");
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  if (response.status === 401 && path !== "/session") expired();
  throw new Refused(response.status, said?.message ?? `status ${response.status}`);
}

export async function session() {
  const found = await ask("GET", "/session");
  csrf = found.csrf;
  return found;
}

export async function logIn(token) {
  const found = await ask("POST", "/session", { token });
  csrf = found.csrf;
  return found;
}

export const logOut = () => ask("DELETE", "/session");
export const tasks = (query) => ask("GET", `/tasks?${new URLSearchParams(query)}`);
export const task = (number) => ask("GET", `/tasks/${number}`);

// All nodes, in as many answers as they need.
export async function nodes() {
  const all = [];
  for (;;) {
    const some = await ask("GET", `/nodes?${new URLSearchParams({ after: all.at(-1)?.name ?? "", limit: PAGE_ROWS })}`);
    all.push(...some);
    if (some.length < PAGE_ROWS) return all;
  }
}

export const node = (name) => ask("GET", `/nodes/${encodeURIComponent(name)}`);
export const users = () => ask("GET", "/users");
export const cluster = () => ask("GET", "/cluster");
export const utilisation = (query) => ask("GET", `/utilisation?${new URLSearchParams(query)}`);
export const command = (type, fields) => ask("POST", "/commands", { type, ...fields });
export const submit = (specs) => ask("POST", "/tasks", { specs }, { "Idempotency-Key": crypto.randomUUID() });
export const logs = (number) => ask("GET", `/tasks/${number}/logs`);
export const logPiece = (path, query) => ask("GET", `${path}?${new URLSearchParams(query)}`);
export const searchLogs = (number, query) => ask("GET", `/tasks/${number}/logs/search?${new URLSearchParams(query)}`);
export const openLogs = (number, query, heard, signal) => answer("GET", `/tasks/${number}/logs/events?${new URLSearchParams(query)}`,
  { headers: { Accept: "text/event-stream", ...(heard ? { "Last-Event-ID": heard } : {}) }, signal });

// Calls `heard` at each change, with the connection's state beside it. The browser connects again by itself, but not
// after an answer that is no stream: a manager that does not lead, or a session that has ended.
export function follow(heard, connected) {
  let source;
  let timer;
  let pause = 1000;
  function open() {
    source = new EventSource(`${ROOT}/events`);
    source.onmessage = (event) => heard(JSON.parse(event.data));
    source.onopen = () => {
      pause = 1000;
      connected(true);
    };
    source.onerror = () => {
      connected(false);
      if (source.readyState !== EventSource.CLOSED) return;
      timer = setTimeout(again, pause);
      pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
    };
  }
  async function again() {
    try {
      await session();
    } catch (error) {
      if (error.status === 401) return expired();
    }
    if (timer !== null) open();
  }
  open();
  return { close: () => {
    clearTimeout(timer);
    timer = null;
    source.close();
  } };
}
