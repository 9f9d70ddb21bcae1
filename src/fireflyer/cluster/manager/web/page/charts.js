// How busy and how productive the nodes were, as lines over time, with the figures as a table.

import * as api from "./api.js";
import { duration, el, percent, svg, table } from "./dom.js";

const SPANS = [["6 hours", 6], ["24 hours", 24], ["7 days", 168], ["30 days", 720]];
const HOUR_NS = 3600e9;
const STEPS = 72;
const AGAIN_MS = 30_000;
const HEIGHT = 230;
const ROOM = { left: 46, right: 12, top: 10, bottom: 26 };
const LINES = [["allocated", "Utilisation: allocated of healthy node-time"], ["productive", "Goodput: productive of healthy node-time"]];
const UNKNOWN = new Set([404, 503]);

export function utilisationPanel() {
  const span = el("select", { "aria-label": "Time span", onchange: () => load() }, SPANS.map(([title, hours]) => el("option", { value: hours, selected: hours === 24 }, `last ${title}`)));
  const plot = el("div.plot");
  const read = el("p.dim.readout", { role: "status" });
  const said = el("p.dim");
  const figures = el("details", { hidden: true }, el("summary", {}, "Figures"));
  const legend = el("p.legend", { hidden: true }, LINES.map(([name, title]) => el("span", {}, svg("svg", { class: "sample", width: 26, height: 8, "aria-hidden": "true" },
    svg("line", { class: name, x1: 0, x2: 26, y1: 4, y2: 4 })), title)));
  let report = null;
  let asked = 0;
  let drawn = "";

  function draw() {
    const width = Math.floor(plot.clientWidth);
    const wanted = `${width} ${asked}`;
    if (!report || !width || wanted === drawn) return;
    drawn = wanted;
    plot.replaceChildren(chart(report, width, (text) => { read.textContent = text; }));
  }
  async function load() {
    asked = Date.now();
    const end = asked * 1e6;
    try {
      report = await api.utilisation({ start_ns: end - Number(span.value) * HOUR_NS, end_ns: end, steps: STEPS });
    } catch (error) {
      if (!UNKNOWN.has(error.status)) throw error;
      report = null;
      plot.replaceChildren();
      said.textContent = error.status === 404 ? "This platform keeps no history, so there are no charts." : `History is off: ${error.message}`;
    }
    legend.hidden = figures.hidden = !report;
    if (!report) return;
    said.textContent = report.steps.some((step) => step.healthy > 0) ? "Productive time is known when a run has ended." : "Nothing is known of this time.";
    draw();
    const open = figures.open;
    figures.replaceChildren(el("summary", {}, "Figures"), numbers(report));
    figures.open = open;
  }
  new ResizeObserver(draw).observe(plot);
  return { element: el("section", {}, el("h3", {}, "Utilisation and goodput"), el("div.row", {}, span), legend, plot, read, said, figures),
    refresh: () => (Date.now() - asked < AGAIN_MS ? Promise.resolve() : load()) };
}

// In a step without healthy nodes nothing is known.
function shares(report, name) {
  return report.steps.map((step) => (step.healthy > 0 ? Math.min(1, step[name] / step.healthy) : null));
}

function chart(report, width, said) {
  const { start_ns: start, end_ns: end, steps } = report;
  const inner = { width: width - ROOM.left - ROOM.right, height: HEIGHT - ROOM.top - ROOM.bottom };
  const y = (share) => ROOM.top + (1 - share) * inner.height;
  const x = (ns) => ROOM.left + ((ns - start) / Math.max(1, end - start)) * inner.width;
  const middle = (index) => x((steps[index].start_ns + (steps[index + 1]?.start_ns ?? end)) / 2);
  const grid = [0, 0.25, 0.5, 0.75, 1].map((share) => [svg("line", { class: "grid", x1: ROOM.left, x2: width - ROOM.right, y1: y(share), y2: y(share) }),
    svg("text", { x: ROOM.left - 6, y: y(share) + 4, "text-anchor": "end" }, `${100 * share} %`)]);
  const ticks = timeTicks(start, end, inner.width).map((ns) => [svg("line", { class: "grid", x1: x(ns), x2: x(ns), y1: y(0), y2: y(0) + 4 }),
    svg("text", { x: x(ns), y: HEIGHT - 6, "text-anchor": "middle" }, instant(ns, end - start))]);
  const lines = LINES.map(([name]) => pieces(shares(report, name)).map((piece) => svg("polyline", { class: name,
    points: piece.map(([index, share]) => `${middle(index).toFixed(1)},${y(share).toFixed(1)}`).join(" ") })));
  const cursor = svg("line", { class: "cursor", y1: y(1), y2: y(0), x1: -9, x2: -9 });
  const made = svg("svg", { class: "chart", width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": describe(report) }, grid, ticks, lines, cursor);
  made.addEventListener("pointermove", (event) => {
    const part = (event.clientX - made.getBoundingClientRect().left - ROOM.left) / inner.width;
    const index = Math.min(steps.length - 1, Math.max(0, Math.floor(part * steps.length)));
    if (!steps.length) return;
    cursor.setAttribute("x1", middle(index));
    cursor.setAttribute("x2", middle(index));
    const [used, good] = LINES.map(([name]) => percent(shares(report, name)[index]));
    said(`${new Date(steps[index].start_ns / 1e6).toLocaleString()}: utilisation ${used}, goodput ${good}`);
  });
  return made;
}

// Runs of neighbouring steps of which something is known; one alone is a short line.
function pieces(found) {
  const all = [];
  found.forEach((share, index) => {
    if (share === null) return;
    if (index && found[index - 1] !== null) all.at(-1).push([index, share]);
    else all.push([[index, share]]);
  });
  return all;
}

function timeTicks(start, end, width) {
  const most = Math.max(2, Math.floor(width / 64));
  const hours = [1, 2, 3, 6, 12, 24, 48, 120, 240].find((one) => (end - start) / (one * HOUR_NS) <= most) ?? 480;
  const step = hours * HOUR_NS;
  const away = new Date(start / 1e6).getTimezoneOffset() * 60e9;
  const found = [];
  for (let ns = Math.ceil((start - away) / step) * step + away; ns <= end; ns += step) found.push(ns);
  return found;
}

function instant(ns, span) {
  const date = new Date(ns / 1e6);
  return span > 48 * HOUR_NS ? date.toLocaleDateString(undefined, { day: "numeric", month: "short" })
    : date.toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit", hour12: false });
}

function describe(report) {
  const sum = (name) => report.steps.reduce((all, step) => all + step[name], 0);
  const healthy = sum("healthy");
  const of = (name) => percent(healthy > 0 ? sum(name) / healthy : null);
  return `Over ${duration(report.end_ns - report.start_ns)}: utilisation ${of("allocated")}, goodput ${of("productive")}. The figures are in the table below.`;
}

function numbers(report) {
  const hours = (seconds) => (seconds / 3600).toFixed(1);
  return table(["From", "#Healthy (node-hours)", "#Allocated", "#Productive", "#Utilisation", "#Goodput"], report.steps.map((step, index) =>
    el("tr", {}, el("td", {}, new Date(step.start_ns / 1e6).toLocaleString()), [hours(step.healthy), hours(step.allocated), hours(step.productive),
      ...LINES.map(([name]) => percent(shares(report, name)[index]))].map((text) => el("td.number", {}, text)))));
}
