"""The user's end of an exec session: standard input, output and errors, their terminal, and signals.

Reading and writing are done in threads: a file cannot be waited for, and a terminal that is stopped blocks who writes.
What is read is read only when it can be sent, and the other end is granted only what has been written.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from typing import Any, Final

from fireflyer.cluster.exec_stream import ExecStream
from fireflyer.cluster.schema.execs import Data, Resize, Signal

__all__ = ["LocalEnd", "raw_terminal", "terminal_size"]

_READ_BYTES: Final = 32 << 10
_TWICE_S: Final = 2.0
_WRITE_FAILED: Final = 128 + signal.SIGPIPE


def terminal_size() -> tuple[int, int]:
    """Rows and columns."""
    try:
        size = os.get_terminal_size(sys.stdin.fileno())
    except (OSError, ValueError):
        return 24, 80
    return min(size.lines, 10_000) or 24, min(size.columns, 10_000) or 80


@contextlib.contextmanager
def raw_terminal() -> Iterator[None]:
    """Of standard input: keys go to the program there, Ctrl-C too."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setraw(fd, termios.TCSADRAIN)  # what was typed already stays
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


class LocalEnd:
    def __init__(self, stream: ExecStream, *, terminal: bool) -> None:
        self._stream = stream
        self._terminal = terminal
        self._loop = asyncio.get_running_loop()
        self._output: queue.Queue[Data | None] = queue.Queue()
        """No more than the window."""
        self._broken = False
        self._read: asyncio.Queue[bytes] = asyncio.Queue()
        self._wanted = threading.Semaphore(1)
        self._written = asyncio.Event()
        """All output."""
        self._interrupted_s: float | None = None

    async def run(self) -> int:
        """The exit code of the program. Raises `Unreachable`; `UsageError` never."""
        threading.Thread(target=self._read_input, daemon=True).start()
        threading.Thread(target=self._write_output, daemon=True).start()
        sending = asyncio.ensure_future(self._send_input())
        handlers = self._hear_signals()
        try:
            async for frame in self._stream.frames():
                if isinstance(frame, Data):
                    self._output.put_nowait(frame)
                if self._broken:
                    self._stream.close("nobody reads its output")
                    return _WRITE_FAILED
        finally:
            for number in handlers:
                self._loop.remove_signal_handler(number)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            self._output.put_nowait(None)
            await self._written.wait()
        return 255 if self._stream.end.exit_code is None else self._stream.end.exit_code

    # --- input ---

    def _read_input(self) -> None:
        fd = sys.stdin.fileno()
        data = b"."
        while data:
            self._wanted.acquire()
            try:
                data = os.read(fd, _READ_BYTES)
            except OSError:
                data = b""
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._read.put_nowait, data)

    async def _send_input(self) -> None:
        while data := await self._read.get():
            await self._stream.send(data)
            self._wanted.release()
        self._stream.end_input()

    # --- output ---

    def _write_output(self) -> None:
        while (frame := self._output.get()) is not None:
            view = memoryview(frame.data)
            try:
                while view and not self._broken:
                    view = view[os.write(2 if frame.stream == 2 else 1, view) :]
            except OSError:
                self._broken = True
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stream.taken, len(frame.data))
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._written.set)

    # --- signals ---

    def _hear_signals(self) -> list[int]:
        heard: dict[int, Any] = {signal.SIGINT: self._interrupt}
        if self._terminal:
            heard[signal.SIGWINCH] = self._resize
        for number, call in heard.items():
            self._loop.add_signal_handler(number, call)
        return list(heard)

    def _resize(self) -> None:
        self._stream.control(Resize(*terminal_size()))

    def _interrupt(self) -> None:
        """Without a terminal there: Ctrl-C goes to the program; a second one ends the session."""
        now_s = time.monotonic()
        if self._interrupted_s is not None and now_s - self._interrupted_s < _TWICE_S:
            self._stream.close("its user interrupted it")
            raise KeyboardInterrupt
        self._interrupted_s = now_s
        self._stream.control(Signal("INT"))
