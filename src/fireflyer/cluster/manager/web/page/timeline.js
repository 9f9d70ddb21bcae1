// A task's runs over time: where it waited, ran, and was interrupted.

import { clock, duration, el, many } from "./dom.js";

const LEGEND = [["queue", "waits"], ["now", "runs"], ["succeeded", "succeeded"], ["suspended", "suspended or interrupted"], ["program", "failed"],
  ["stopped", "stopped"]];
const LEFT = new Set(["suspended", "interrupted"]);

export function timeline(task, runs) {
  if (!runs.length) return null;
  const end = task.ended_ns || Date.now() * 1e6;
  const whole = Math.max(1, end - task.submitted_ns);
  const share = (ns) => `${Math.min(100, Math.max(0, (100 * ns) / whole))}%`;
  const until = (run) => run.over_ns || run.ended_ns || end;
  const bars = runs.map((run) => {
    const text = `Run ${run.number} on ${many(run.nodes.length, "node")}, ${duration(until(run) - run.scheduled_ns)}: ${run.cause || run.state}`;
    const bar = el(`a.${run.cause || "now"}`, { href: `#/tasks/${task.id}/logs/${run.number}`, title: `${text}. Open its logs.`, "aria-label": `${text}. Logs` });
    bar.style.left = share(run.scheduled_ns - task.submitted_ns);
    bar.style.width = share(until(run) - run.scheduled_ns);
    return bar;
  });
  const interruptions = runs.filter((run) => LEFT.has(run.cause)).length;
  const waited = whole - runs.reduce((sum, run) => sum + until(run) - run.scheduled_ns, 0);
  const times = [0, 1 / 2, 1].map((part) => el("span", {}, part === 1 && !task.ended_ns ? "now" : clock(task.submitted_ns + part * whole)));
  const present = LEGEND.filter(([name]) => name === "queue" || runs.some((run) => name === classOf(run)));
  return el("section", {}, el("h3", {}, "Runs over time"),
    el("p.dim", {}, `${many(runs.length, "run")}, ${many(interruptions, "interruption")}, ${duration(Math.max(0, waited))} without a run`),
    el("div.time", { role: "group", "aria-label": many(runs.length, "run") }, bars), el("p.axis", { "aria-hidden": "true" }, times),
    el("p.legend", {}, present.map(([name, title]) => el("span", {}, el(`i.key.${name}`), title))));
}

function classOf(run) {
  if (run.cause === null) return "now";
  if (LEFT.has(run.cause)) return "suspended";
  return ["succeeded", "stopped"].includes(run.cause) ? run.cause : "program";
}
