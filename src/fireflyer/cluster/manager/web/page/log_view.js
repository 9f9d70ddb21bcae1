// A box of which only the lines in view are elements, so a log of 100,000 lines is as fast as one of a hundred. All
// lines have one height; long ones are scrolled to the side.

import { el } from "./dom.js";

const LINE_PX = 19;
const AROUND = 20;

export class LogView {
  // `stuck(true)`: the reader is at the end and stays there; `stuck(false)`: they went up.
  constructor(lines, stuck) {
    this.lines = lines;
    this.stuck = stuck;
    this.follows = true;
    this.needle = "";
    this.marked = null;
    this._window = el("div.window");
    this._space = el("div.space", {}, this._window);
    this.element = el("div.log", { tabindex: 0, role: "region", "aria-label": "Log lines", onscroll: () => this._scrolled() }, this._space);
    this._top = 0;
    this._dropped = 0;
    this._drawn = "";
    this._frame = 0;
    this._resize = new ResizeObserver(() => this.draw());
    this._resize.observe(this.element);
  }

  close() {
    this._resize.disconnect();
    cancelAnimationFrame(this._frame);
  }

  draw() {
    this._frame ||= requestAnimationFrame(() => {
      this._frame = 0;
      this._draw();
    });
  }

  follow(follows) {
    this.follows = follows;
    this.draw();
  }

  // What was put before the first line moves the others down, and not what is in view.
  added(count) {
    this._space.style.height = `${this.lines.lines.length * LINE_PX}px`;
    this._moveTo(this.element.scrollTop + count * LINE_PX);
    this.draw();
  }

  show(index) {
    this._space.style.height = `${this.lines.lines.length * LINE_PX}px`;
    this._moveTo(Math.max(0, index * LINE_PX - this.element.clientHeight / 3));
    this.draw();
  }

  _moveTo(top) {
    this.element.scrollTop = top;
    this._top = this.element.scrollTop;
  }

  // Only a reader scrolls up; lines that come make the box longer, and the end is then elsewhere.
  _scrolled() {
    const { scrollTop, clientHeight, scrollHeight } = this.element;
    const atEnd = scrollTop + clientHeight >= scrollHeight - 2;
    if (scrollTop < this._top - 1 && this.follows && !atEnd) this.stuck(false);
    else if (scrollTop > this._top + 1 && !this.follows && atEnd) this.stuck(true);
    this._top = scrollTop;
    this.draw();
  }

  _draw() {
    const { lines, dropped, changes } = this.lines;
    this._space.style.height = `${lines.length * LINE_PX}px`;
    if (this.follows) this._moveTo(this.element.scrollHeight);
    else if (dropped > this._dropped) this._moveTo(Math.max(0, this.element.scrollTop - (dropped - this._dropped) * LINE_PX));
    this._dropped = dropped;
    const first = Math.max(0, Math.floor(this.element.scrollTop / LINE_PX) - AROUND);
    const last = Math.min(lines.length, Math.ceil((this.element.scrollTop + this.element.clientHeight) / LINE_PX) + AROUND);
    // A selection of text lasts while nothing changes.
    const drawn = `${first} ${last} ${changes} ${this.needle}`;
    if (drawn === this._drawn) return;
    this._drawn = drawn;
    this._window.style.top = `${first * LINE_PX}px`;
    this._window.replaceChildren(...lines.slice(first, last).map((line) => this._line(line)));
  }

  _line(line) {
    const name = line.mark ? "div.line.mark" : line === this.marked ? "div.line.found" : "div.line";
    return el(name, {}, line.label ? el("span.from", {}, line.label) : null, line.mark ? line.text : this._text(line.text));
  }

  _text(text) {
    if (!this.needle) return [text || "\u00a0"];
    const parts = [];
    const low = text.toLowerCase();
    let at = 0;
    // Texts whose lower case has another length have their marks elsewhere; such are shown without.
    for (let found = low.length === text.length ? low.indexOf(this.needle) : -1; found >= 0; found = low.indexOf(this.needle, at)) {
      parts.push(text.slice(at, found), el("mark", {}, text.slice(found, found + this.needle.length)));
      at = found + this.needle.length;
    }
    return [...parts, text.slice(at) || (at ? "" : "\u00a0")];
  }
}
