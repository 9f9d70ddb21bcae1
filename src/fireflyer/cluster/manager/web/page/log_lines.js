// Lines of logs as the page keeps them: bounded in number and length, and without characters that act instead of being
// shown. A line is {text, label, offset, mark}; a mark is a line that the platform says, not a rank.

export const MAX_LINES = 100_000;
const MAX_LINE_CHARS = 4000;
const MAX_CHARS = 32 << 20;
const SPARE = 10_000;
const ENDS = /\r\n|\n|\r/g;
// Controls but the tab, and what changes the direction of text.
const ACTING = /[\u0000-\u0008\u000a-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g;

// Controls as terminals write them: ^[ is escape, which begins colours.
export function visible(text) {
  return text.replace(ACTING, (one) => {
    const code = one.charCodeAt(0);
    return code < 0x20 ? `^${String.fromCharCode(0x40 + code)}` : `<U+${code.toString(16).toUpperCase().padStart(4, "0")}>`;
  });
}

export class LogLines {
  constructor() {
    this.changes = 0; // never the same number for other lines: by it the view knows whether to draw again
    this.clear();
  }

  clear() {
    this.lines = [];
    this.dropped = 0; // at the front, since the last `clear`
    this.changes += 1;
    this.chars = 0;
    this.open = new Map(); // logs whose last line ended with a carriage return: what comes next replaces it
  }

  // `log` names the log in the map above.
  text(log, label, offset, text) {
    for (const { line, replaces } of split(text)) {
      const shown = cut(visible(line));
      const old = this.open.get(log);
      if (old) {
        this.chars += shown.length - old.text.length;
        old.text = shown;
      }
      const now = old ?? { text: shown, label, offset, mark: false };
      if (!old) this._push(now);
      if (replaces) this.open.set(log, now);
      else this.open.delete(log);
    }
    this.changes += 1;
  }

  mark(text) {
    this._push({ text: cut(visible(text)), label: "", offset: null, mark: true });
    this.changes += 1;
  }

  prepend(label, text) {
    const made = split(text).map(({ line }) => ({ text: cut(visible(line)), label, offset: null, mark: false }));
    this.lines = [...made, ...this.lines].slice(0, MAX_LINES);
    this.chars = this.lines.reduce((sum, line) => sum + line.text.length, 0);
    this.changes += 1;
    return made.length;
  }

  _push(line) {
    this.lines.push(line);
    this.chars += line.text.length;
    if (this.lines.length < MAX_LINES + SPARE && this.chars < MAX_CHARS) return;
    let count = Math.max(this.lines.length - MAX_LINES, 0);
    let gone = this.lines.slice(0, count).reduce((sum, one) => sum + one.text.length, 0);
    for (; this.chars - gone > MAX_CHARS / 2 && count < this.lines.length - 1; count += 1) gone += this.lines[count].text.length;
    this.lines.splice(0, count);
    this.chars -= gone;
    this.dropped += count;
  }
}

function split(text) {
  const found = [];
  let begin = 0;
  for (const end of text.matchAll(ENDS)) {
    found.push({ line: text.slice(begin, end.index), replaces: end[0] === "\r" });
    begin = end.index + end[0].length;
  }
  if (begin < text.length) found.push({ line: text.slice(begin), replaces: false });
  return found;
}

function cut(text) {
  return text.length > MAX_LINE_CHARS ? `${text.slice(0, MAX_LINE_CHARS)} … (${text.length - MAX_LINE_CHARS} characters more)` : text;
}
