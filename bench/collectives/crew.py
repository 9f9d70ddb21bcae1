"""Processes that stay alive and do what they are told, so that ours and the peers can take turns.

Each process connects to a Unix socket of the harness and greets it with `{"rank": …, "pid": …}`. Then it blocks in a
read until there is an order, a line of words, and answers with a JSON object on a line. A crew that waits for orders
takes no processor time from the one that is measured.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final, NamedTuple, Self

__all__ = ["Crew", "CrewDied", "Member"]

START_TIMEOUT_S: Final = 400.0
ANSWER_TIMEOUT_S: Final = 300.0
_MESSAGE_BYTES: Final = 2000


class CrewDied(Exception):
    """A process of a crew ended or did not answer; the message has the end of what it wrote."""


class Member(NamedTuple):
    rank: int
    pid: int
    greeting: dict[str, Any]
    sock: socket.socket
    reader: Any


class Crew:
    """`commands` are started with the path of the socket put in for `{socket}`; `size` processes must greet."""

    def __init__(self, name: str, commands: Sequence[Sequence[str]], size: int, env: dict[str, str]) -> None:
        self.name = name
        with ExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="ff-bench-"))
            self._log = stack.enter_context(tempfile.TemporaryFile())
            path = os.path.join(directory, "orders")
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(path)
            listener.listen(size)
            self._processes: list[subprocess.Popen[bytes]] = []
            stack.callback(self._end)
            for command in commands:
                filled = [word.replace("{socket}", path) for word in command]
                self._processes.append(
                    subprocess.Popen(
                        filled, env=os.environ | env, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
                    )
                )
            self.members = self._greetings(listener, size, stack)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tell(self, *words: object) -> list[dict[str, Any]]:
        """Gives all an order and returns their answers, by rank."""
        self.order(*words)
        return self.answers()

    def tell_each(self, orders: Sequence[Sequence[object]]) -> list[dict[str, Any]]:
        """Gives each member its own order."""
        for member, words in zip(self.members, orders, strict=True):
            self._send(member, words)
        return self.answers()

    def order(self, *words: object) -> None:
        for member in self.members:
            self._send(member, words)

    def answers(self) -> list[dict[str, Any]]:
        try:
            lines = [member.reader.readline() for member in self.members]
        except OSError as error:
            raise CrewDied(f"{self.name} did not answer: {error}; {self._last_words()}") from error
        if not all(lines):
            raise CrewDied(f"{self.name} ended; {self._last_words()}")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        try:
            self.order("stop")
            for process in self._processes:
                process.wait(60)
        except (CrewDied, subprocess.TimeoutExpired):
            pass
        self._stack.close()

    def _send(self, member: Member, words: Sequence[object]) -> None:
        try:
            member.sock.sendall((" ".join(map(str, words)) + "\n").encode())
        except OSError as error:
            raise CrewDied(f"{self.name} ended: {error}; {self._last_words()}") from error

    def _greetings(self, listener: socket.socket, size: int, stack: ExitStack) -> list[Member]:
        members: list[Member] = []
        deadline = time.monotonic() + START_TIMEOUT_S
        listener.settimeout(0.5)
        while len(members) < size:
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                if time.monotonic() > deadline or any(process.poll() is not None for process in self._processes):
                    raise CrewDied(f"{self.name} did not start; {self._last_words()}") from None
                continue
            sock.settimeout(ANSWER_TIMEOUT_S)
            stack.enter_context(sock)
            reader = stack.enter_context(sock.makefile("rb"))
            greeting = json.loads(reader.readline() or b"{}")
            if "rank" not in greeting:
                raise CrewDied(f"{self.name} did not start; {self._last_words()}")
            members.append(Member(greeting["rank"], greeting["pid"], greeting, sock, reader))
        return sorted(members)

    def _last_words(self) -> str:
        codes = [self._code(process) for process in self._processes]  # first: a process that ends still writes
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - _MESSAGE_BYTES))
        said = self._log.read().decode(errors="replace").strip() or "it wrote nothing"
        return f"{said} (exit codes {codes})"

    @staticmethod
    def _code(process: subprocess.Popen[bytes]) -> int | None:
        try:
            return process.wait(1)
        except subprocess.TimeoutExpired:
            return None

    def _end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.terminate()  # mpirun ends its ranks
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
            process.wait()
