// Logs of a task: followed from near their end, or read at a place that a search has found.

import * as api from "./api.js";
import { el, many, state } from "./dom.js";
import { MAX_LINES, LogLines } from "./log_lines.js";
import { searchPanel } from "./log_search.js";
import { LogPieces, LogStream, tailOf } from "./log_source.js";
import { LogView } from "./log_view.js";

const RANKS_AT_ONCE = 64;
const RANKS_TOGETHER = 1000;

export function logsPage(number, run) {
  return new LogsPage(number, run);
}

class LogsPage {
  constructor(number, run) {
    this.number = number;
    this.live = true;
    this.wanted = run;
    this.known = null; // the logs that were there when the page was opened
    this.task = null;
    this.all = [];
    this.stream = this.pieces = this.last = null;
    this.lines = new LogLines();
    this.view = new LogView(this.lines, (stuck) => this._stick(stuck));
    this.title = el("h2", {}, el("a", { href: `#/tasks/${number}` }, `Task ${number}`), " logs");
    this.runs = el("select", { "aria-label": "Run", onchange: () => this._choose() });
    this.ranks = el("select", { "aria-label": "Rank", onchange: () => this._open() });
    this.follows = el("input", { type: "checkbox", checked: true, onchange: () => this._followed() });
    this.earlier = el("button", { onclick: () => this._earlier() }, "Earlier lines");
    this.later = el("button", { onclick: () => this._later() }, "Later lines");
    this.said = el("p.dim", { role: "status" });
    this.count = el("span.dim");
    this.search = searchPanel(number, { scope: () => ({ run: this._run(), rank: this._rank() }), open: (found) => this._openAt(found),
      changed: (text) => { this.view.needle = text.toLowerCase(); this.view.draw(); } });
    this.element = el("section.logs", {}, this.title, el("div.row", {}, el("label", {}, "Run", this.runs), el("label", {}, "Rank", this.ranks),
      this.search.form), this.search.results, el("div.row", {}, el("label.check", {}, this.follows, "Follow"), this.earlier, this.later, this.count, this.said), this.view.element);
  }

  async refresh() {
    const { task, runs } = await api.task(this.number);
    [this.task, this.all] = [task, runs];
    this.title.replaceChildren(el("a", { href: `#/tasks/${this.number}` }, `Task ${task.id} ${task.name}`), " logs ", state(task.outcome || task.state));
    if (!this.known) await this._start();
  }

  // Changes may ask for a second refresh before the first one is answered.
  async _start() {
    const { runs } = await api.logs(this.number);
    if (this.known) return;
    this.known = runs;
    this.runs.replaceChildren(el("option", { value: "" }, "newest, and what follows"), ...this.known.map((one) => this._option("run", one.run)));
    if (this.known.some((one) => one.run === this.wanted)) this.runs.value = String(this.wanted);
    this._choose();
  }

  leave() {
    this.stream?.stop();
    this.view.close();
  }

  // After a new login.
  resume() {
    if (this.stream && !this.stream.ended) this._open();
  }

  key(key) {
    if (key === "f") this.follows.click();
  }

  _option(word, value) {
    return el("option", { value }, `${word} ${value}`);
  }

  _run() {
    return this.runs.value === "" ? null : Number(this.runs.value);
  }

  _rank() {
    return this.ranks.value === "" ? null : Number(this.ranks.value);
  }

  _shownRun() {
    const run = this._run();
    return run === null ? this.known.at(-1) : this.known.find((one) => one.run === run);
  }

  // Those that have written, and those that may yet: who has chosen one rank does not hear the first line of another.
  _ranksOf(shown) {
    const number = this._run() ?? shown?.run;
    const run = number === undefined ? this.all.at(-1) : this.all.find((one) => one.number === number);
    const expected = (run?.nodes.length ?? 0) * (this.task?.spec?.program?.ranks_per_node ?? 0);
    const written = (shown?.streams ?? []).map((one) => one.rank).filter((rank) => rank !== null);
    return [...new Set([...written, ...Array(expected).keys()])].sort((one, other) => one - other);
  }

  _choose() {
    const ranks = this._ranksOf(this._shownRun());
    const old = this.ranks.value;
    this.ranks.replaceChildren(...(ranks.length > RANKS_TOGETHER ? [] : [el("option", { value: "" }, "all ranks")]), ...ranks.map((rank) => this._option("rank", rank)));
    const kept = [...this.ranks.options].some((one) => one.value === old);
    this.ranks.value = kept ? old : ranks.length > RANKS_AT_ONCE ? String(ranks[0]) : "";
    this._open();
  }

  _begin() {
    this.stream?.stop();
    this.stream = this.pieces = this.last = null;
    this.lines.clear();
    this.view.marked = null;
  }

  // From near the end on.
  _open() {
    this._begin();
    const shown = this._shownRun();
    const positions = shown ? tailOf(shown, this._rank()) : [];
    const query = { ...(this._run() === null ? {} : { run: this._run() }), ...(this._rank() === null ? {} : { rank: this._rank() }) };
    const newest = positions.at(-1);
    if (newest && this._rank() !== null) this.pieces = new LogPieces(this.number, { ...newest, end: null });
    const cutOff = positions.some((one) => one.offset > 0);
    if (cutOff) this.lines.mark(this.pieces ? "Earlier lines are above: press Earlier lines." : "Only the end is shown. Choose one rank to read earlier lines.");
    this.stream = new LogStream(this.number, query, positions, { event: (event) => this._heard(event), connected: () => this._say("following"),
      failed: (error) => this._say(error ? error.message : "The platform does not answer; trying again.") });
    this._stick(true);
  }

  // One log, at a line of it.
  async _openAt({ run, attempt, rank, offset }) {
    this._begin();
    this.runs.value = String(run);
    const option = [...this.ranks.options].find((one) => one.value === String(rank));
    if (!option) this.ranks.append(this._option("rank", rank));
    this.ranks.value = String(rank);
    this.pieces = new LogPieces(this.number, { run, attempt, rank, offset });
    this._stick(false);
    await this._later();
    this.view.marked = this.lines.lines.find((line) => !line.mark);
    await this._earlier();
    this.view.show(this.lines.lines.indexOf(this.view.marked));
    this._say(`run ${run}, attempt ${attempt}, rank ${rank}`);
  }

  async _earlier() {
    const pieces = this.pieces;
    await this._try(async () => {
      const text = await pieces.earlier();
      if (pieces === this.pieces) this.view.added(this.lines.prepend("", text));
    });
  }

  async _later() {
    const pieces = this.pieces;
    await this._try(async () => {
      const { text, offset, lost } = await pieces.later();
      if (pieces !== this.pieces) return;
      if (lost > 0) this.lines.mark(`${lost} bytes were lost here`);
      this.lines.text("", "", offset, text);
      this.view.draw();
    });
  }

  async _try(read) {
    try {
      await read();
    } catch (error) {
      this._say(error.message);
    }
    this._show();
  }

  _followed() {
    if (this.follows.checked && !this.stream) this._open();
    else this._stick(this.follows.checked);
  }

  _stick(stuck) {
    if (stuck && !this.stream) { // the end of what was read is not the end of the log
      this.follows.checked = false;
      return;
    }
    this.follows.checked = stuck;
    this.view.follow(stuck);
    this._show();
  }

  _heard(event) {
    if (event.what === "text") this._text(event);
    else if (event.what === "state") this.lines.mark(`task ${this.number} is ${event.state}${event.why ? `: ${event.why}` : ""}`);
    else this._end(event);
    this.view.draw();
    this._show();
  }

  _text({ run, attempt, rank, offset, text, lost_bytes: lost, cut }) {
    const log = `${run}.${attempt}.${rank}`;
    const part = `${run}.${attempt}`;
    if (this.last !== part) this.lines.mark(`run ${run}, attempt ${attempt}`);
    this.last = part;
    if (lost) this.lines.mark(`rank ${rank}: ${lost} bytes were lost here`);
    this.lines.text(log, this._rank() === null ? `${rank}` : "", offset, text);
    if (cut) this.lines.mark(`rank ${rank}: the rest was not kept, the run has used up its quota of logs`);
    if (this._rank() === null && ![...this.ranks.options].some((one) => one.value === String(rank))) this.ranks.append(this._option("rank", rank));
    if (![...this.runs.options].some((one) => one.value === String(run))) this._addRun(run);
  }

  async _addRun(run) {
    this.runs.append(this._option("run", run));
    this.known = (await api.logs(this.number).catch(() => ({ runs: this.known }))).runs;
  }

  _end({ state: name, outcome, exit_code: code, reason, complete }) {
    const how = name === "finished" ? `the task has ${outcome}${code === null ? "" : `, exit code ${code}`}${reason ? `: ${reason}` : ""}` : "nothing more comes of this run";
    this.lines.mark(complete ? how : `${how}; some of its lines never came from the nodes`);
    this._say("all was read");
  }

  _say(text) {
    if (this.said.textContent !== text) this.said.textContent = text;
  }

  _show() {
    const { lines, dropped } = this.lines;
    this.count.textContent = `${many(lines.length, "line")}${dropped ? `, the last of ${(lines.length + dropped).toLocaleString()}` : ""}`;
    this.earlier.disabled = !this.pieces || this.pieces.from === 0 || lines.length >= MAX_LINES;
    this.earlier.hidden = !this.pieces;
    this.later.hidden = this.stream !== null;
    this.later.disabled = Boolean(this.pieces?.over);
  }
}
