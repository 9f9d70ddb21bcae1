// The HTTP API with the session's cookie; what changes something carries the session's csrf value.

const ROOT = "/api/v1";
const PAGE_ROWS = 1000;
let csrf = "";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(method, path, body, headers = {}) {
  let response;
  try {
    response = await fetch(ROOT + path, {
      method,
      credentials: "same-origin",
      headers: { Accept: "application/json", ...(body === undefined ? {} : { "Content-Type": "application/json" }),
        ...(method === "GET" ? {} : { "X-FF-CSRF": csrf }), ...headers },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch {
    throw new Refused(0, "The platform cannot be reached.");
  }
  if (response.status === 204) return null;
  const answer = await response.json().catch(() => ({ message: `status ${response.status}` }));
  if (!response.ok) throw new Refused(response.status, answer.message);
  return answer;
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

export const users = () => ask("GET", "/users");
export const cluster = () => ask("GET", "/cluster");
export const command = (type, fields) => ask("POST", "/commands", { type, ...fields });
export const submit = (specs) => ask("POST", "/tasks", { specs }, { "Idempotency-Key": crypto.randomUUID() });

// Calls `heard` at each change, with the connection's state beside it; the browser connects again by itself.
export function follow(heard, connected) {
  const source = new EventSource(`${ROOT}/events`);
  source.onmessage = (event) => heard(JSON.parse(event.data));
  source.onopen = () => connected(true);
  source.onerror = () => connected(false);
  return source;
}
