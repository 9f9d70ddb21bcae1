// Where lines of logs come from: the stream of what is printed, from near its end on, or pieces of one log around a
// place.

import * as api from "./api.js";
import { readEvents } from "./event_stream.js";

const TAIL_BYTES = 4 << 20;
const LEAST_TAIL_BYTES = 16 << 10;
const PIECE_BYTES = 64 << 10;
const LONGEST_PAUSE_MS = 15_000;

// The newest attempt from near its end, the one before it a little, older ones not.
export function tailOf(runLogs, rank) {
  const logs = runLogs.streams.filter((one) => one.rank !== null && (rank === null || one.rank === rank));
  const newest = Math.max(...logs.map((one) => one.attempt));
  const each = Math.max(LEAST_TAIL_BYTES, Math.floor(TAIL_BYTES / Math.max(1, logs.length)));
  return logs.filter((one) => one.attempt >= newest - 1).map((one) => ({ run: runLogs.run, attempt: one.attempt, rank: one.rank,
    offset: Math.max(0, one.end - (one.attempt === newest ? each : LEAST_TAIL_BYTES)) }));
}

const nameOf = ({ run, attempt, rank }) => `${run}.${attempt}.${rank}`;

// Follows until `stop` or the end. Cut off, it asks again from where it was. `to`: {event, connected, failed}.
export class LogStream {
  constructor(task, query, positions, to) {
    Object.assign(this, { task, query, to });
    this.positions = new Map(positions.map((one) => [nameOf(one), one]));
    this.half = new Set(positions.filter((one) => one.offset > 0).map(nameOf)); // begin within a line, which is left out
    this.abort = new AbortController();
    this.ended = false;
    this._run();
  }

  stop() {
    this.abort.abort();
  }

  async _run() {
    for (let pause = 1000; !this.ended && !this.abort.signal.aborted; pause = Math.min(2 * pause, LONGEST_PAUSE_MS)) {
      try {
        const heard = [...this.positions.values()].map((one) => `${nameOf(one)}.${one.offset}`).join(",");
        const response = await api.openLogs(this.task, this.query, heard, this.abort.signal);
        this.to.connected();
        await readEvents(response, (data, id) => {
          pause = 500;
          this._heard(JSON.parse(data), id);
        });
      } catch (error) {
        if (this.abort.signal.aborted) return;
        if (error.status >= 400 && error.status < 500 && error.status !== 429) return this.to.failed(error);
      }
      if (this.ended || this.abort.signal.aborted) return;
      this.to.failed(null);
      await new Promise((resolve) => { setTimeout(resolve, pause); });
    }
  }

  _heard(event, id) {
    if (this.abort.signal.aborted) return;
    this.ended = event.what === "end";
    if (event.what === "text") {
      if (id) this._remember(id);
      if (this.half.delete(nameOf(event))) event.text = event.text.slice(event.text.indexOf("\n") + 1);
    }
    this.to.event(event);
  }

  // Of the newest run the last two attempts: older ones are read.
  _remember(id) {
    const [run, attempt, rank, offset] = id.split(".").map(Number);
    for (const [name, one] of this.positions) {
      if (one.run !== run || one.attempt < attempt - 1) this.positions.delete(name);
    }
    this.positions.set(nameOf({ run, attempt, rank }), { run, attempt, rank, offset });
  }
}

// Whole lines of one log, before and after what was read of it.
export class LogPieces {
  constructor(task, { run, attempt, rank, offset, end = offset }) {
    this.path = `/tasks/${task}/logs/${run}/attempt-${attempt}-rank-${rank}`;
    Object.assign(this, { run, attempt, rank, from: offset, to: end, over: false });
  }

  // Over gaps too; a line that begins before the piece is left for the next one.
  async earlier() {
    const begin = Math.max(0, this.from - PIECE_BYTES);
    let [text, at, from] = ["", begin, begin];
    while (at < this.from) {
      const { offset, bytes } = await this._read(at, this.from - at);
      const taken = bytes.subarray(0, Math.max(0, this.from - offset));
      if (!taken.length) break;
      const cut = offset === begin && begin > 0 ? taken.indexOf(10) + 1 : 0;
      const left = cut < taken.length ? cut : 0;
      if (offset === begin) from = begin + left;
      text += decode(taken.subarray(left));
      at = offset + taken.length;
    }
    this.from = from;
    return text;
  }

  async later() {
    const { offset, bytes, closed } = await this._read(this.to, PIECE_BYTES);
    const last = bytes.lastIndexOf(10) + 1;
    const whole = closed || last === 0 ? bytes.length : last;
    const before = this.to;
    this.to = offset + whole;
    this.over = bytes.length < PIECE_BYTES;
    return { text: decode(bytes.subarray(0, whole)), offset, lost: offset - before };
  }

  async _read(offset, limit) {
    const piece = await api.logPiece(this.path, { offset, limit });
    const bytes = Uint8Array.from(atob(piece.data), (one) => one.charCodeAt(0));
    return { offset: piece.offset, bytes, closed: piece.closed || piece.cut };
  }
}

function decode(bytes) {
  return new TextDecoder().decode(bytes);
}
