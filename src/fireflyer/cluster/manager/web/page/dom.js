// Elements from names, attributes and children. Children that are no elements become text: nothing that users wrote is
// ever read as HTML.

export function el(name, attributes = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const made = document.createElement(tag);
  if (classes.length) made.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined).map(asNode));
  return made;
}

// The same for drawings.
export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.flat(Infinity).map(asNode));
  return made;
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

export function duration(ns) {
  if (ns === null || ns === undefined) return "–";
  const seconds = Math.max(0, ns / 1e9);
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

export function clock(ns) {
  return ns ? new Date(ns / 1e6).toLocaleString() : "–";
}

export function state(name) {
  return el(`span.state.${name}`, {}, name);
}

export function many(count, word) {
  return `${count.toLocaleString()} ${word}${count === 1 ? "" : "s"}`;
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)} %`;
}

// A heading that begins with # stands over numbers.
function heading(text) {
  return String(text).startsWith("#") ? el("th.number", {}, text.slice(1)) : text;
}

export function table(headings, rows) {
  const cells = (row, tag) => row.map((cell) => (cell instanceof HTMLTableCellElement ? cell : el(tag, {}, cell)));
  return el("div.scroll", {}, el("table", {}, el("thead", {}, el("tr", {}, cells(headings.map(heading), "th"))), el("tbody", {}, rows)));
}

export function linkRow(target, ...cells) {
  const go = () => { location.hash = target; };
  return el("tr.link", { tabindex: 0, onclick: go, onkeydown: (event) => event.key === "Enter" && go() },
    cells.map((cell) => (cell instanceof HTMLTableCellElement ? cell : el("td", {}, cell))));
}
