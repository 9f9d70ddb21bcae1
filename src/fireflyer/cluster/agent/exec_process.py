"""The processes of one exec session on its node: a guard, below it the program as the account of the run.

The guard's input is a pipe that only this agent holds, so the processes end with the session, with the agent, and with
the lease of the node. They carry the mark of the run, by which its launcher's end finds them, too.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import struct
import sys
import termios
from typing import Final

from fireflyer.base.os_errors import translate_os_error
from fireflyer.cluster.agent import exec_program
from fireflyer.cluster.agent.accounts import Account
from fireflyer.cluster.agent.start import as_account
from fireflyer.cluster.schema.execs import ExecOrder, StreamNumber
from fireflyer.runtime.processes.guard_command import GuardCommand
from fireflyer.runtime.processes.guarded import MARKER, Guarded, kill_marked

__all__ = ["ExecProcess", "exec_mark"]

_READ_BYTES: Final = 32 << 10
_KILLED: Final = 128 + signal.SIGKILL
_FROM_AGENT: Final = (MARKER, "PATH", "LANG", "TZ")


def exec_mark(run_token: str, session: str) -> str:
    return f"{run_token}.exec.{session}"


class ExecProcess:
    """`readable` is set when `read` may find something. `end` at the end."""

    def __init__(self, order: ExecOrder, account: Account | None, lease_file: str) -> None:
        """Raises `FireflyerError`."""
        self.readable = asyncio.Event()
        self._mark = exec_mark(order.run_token, order.id)
        self._uid = None if account is None else account.uid
        self._code: int | None = None
        self._loop = asyncio.get_running_loop()
        self._terminal = order.program is not None and order.program.terminal
        self._ours: set[int] = set()
        theirs: list[int] = []
        try:
            self._open(order, account, theirs)
            self._start(order, account, lease_file, theirs)
        except OSError as error:
            self._close_all()
            raise translate_os_error(error, "start a program") from error
        except BaseException:
            self._close_all()
            raise
        finally:
            for fd in set(theirs):
                os.close(fd)

    def _open(self, order: ExecOrder, account: Account | None, theirs: list[int]) -> None:
        """Pipes or a terminal; `theirs` get the numbers 0, 1 and 2 in the program."""
        self._outputs: dict[StreamNumber, int] = {}
        if self._terminal:
            master, slave = os.openpty()
            self._ours.add(master)
            theirs += [slave, slave, slave]
            if account is not None:
                os.fchown(slave, account.uid, -1)
            self._input = master
            self._outputs[1] = os.dup(master)
            self._ours.add(self._outputs[1])
            if order.program is not None:
                self.resize(order.program.rows, order.program.columns)
        else:
            reader, self._input = os.pipe2(os.O_CLOEXEC)
            theirs.append(reader)
            self._ours.add(self._input)
            for number in (1, 2):
                self._outputs[1 if number == 1 else 2], writer = os.pipe2(os.O_CLOEXEC)
                theirs.append(writer)
            self._ours |= set(self._outputs.values())
        for fd in self._ours:
            os.set_blocking(fd, False)

    def _start(self, order: ExecOrder, account: Account | None, lease_file: str, theirs: list[int]) -> None:
        program = order.program
        told = {
            "token": order.run_token,
            "rank": order.rank,
            "argv": [] if program is None else list(program.argv),
            "terminal": self._terminal,
            "term": "" if program is None else program.term,
            "port": 0 if order.port is None else order.port.port,
            "fds": theirs,
        }
        orders = os.memfd_create("exec", 0)
        try:
            os.write(orders, json.dumps(told).encode())
            os.lseek(orders, 0, os.SEEK_SET)
            command = [sys.executable, "-I", "-S", exec_program.__file__, str(orders)]
            if account is not None:
                command = as_account(account, command, ",".join(map(str, [orders, *sorted(set(theirs))])))
            with open(theirs[2], "wb", closefd=False) as errors:
                self._guarded = Guarded(
                    GuardCommand.here(command, until=lease_file),
                    token=self._mark,
                    environment={name: os.environ[name] for name in _FROM_AGENT if name in os.environ}
                    if account is not None
                    else dict(os.environ),
                    log=errors,
                    on_exit=self._on_exit,
                    pass_fds=(orders, *sorted(set(theirs))),
                )
        finally:
            os.close(orders)
        for fd in self._outputs.values():
            self._loop.add_reader(fd, self.readable.set)

    def _on_exit(self, code: int) -> None:
        self._code = code

    async def exit_code(self) -> int:
        """Returns when the program has ended and nothing that it started lives."""
        await self._guarded.wait_gone()
        return _KILLED if self._code is None else self._code

    # --- input ---

    async def write(self, data: bytes) -> bool:
        """All of it; False where nobody reads any more."""
        view = memoryview(data)
        while view:
            if self._input < 0:
                return False
            try:
                view = view[os.write(self._input, view) :]
            except BlockingIOError:
                await self._writable()
            except OSError:
                return False
        return True

    async def _writable(self) -> None:
        writable = asyncio.Event()
        self._loop.add_writer(self._input, writable.set)
        try:
            await writable.wait()
        finally:
            if self._input >= 0:
                self._loop.remove_writer(self._input)

    def end_input(self) -> None:
        """A terminal has no end of input; its user types one."""
        if not self._terminal and self._input >= 0:
            self._ours.discard(self._input)
            os.close(self._input)
            self._input = -1

    # --- output ---

    def read(self, most: int) -> tuple[StreamNumber, bytes] | None:
        """Nothing yet: `readable` is set when there is more; the data of a stream that has ended is empty."""
        for stream, fd in list(self._outputs.items()):
            try:
                data = os.read(fd, min(most, _READ_BYTES))
            except BlockingIOError:
                continue
            except OSError:
                data = b""  # of a terminal that nobody has open any more
            if not data:
                self._loop.remove_reader(fd)
                self._ours.discard(fd)
                os.close(fd)
                del self._outputs[stream]
            else:  # the other one is next: errors are not behind output without an end
                self._outputs[stream] = self._outputs.pop(stream)
            return stream, data
        self.readable.clear()
        return None

    def pause(self) -> None:
        """The other end takes nothing now: what is there is not looked at again and again."""
        for fd in self._outputs.values():
            self._loop.remove_reader(fd)

    def resume(self) -> None:
        self.readable.set()
        for fd in self._outputs.values():
            self._loop.add_reader(fd, self.readable.set)

    @property
    def outputs(self) -> int:
        """Streams that have not ended."""
        return len(self._outputs)

    # --- control ---

    def resize(self, rows: int, columns: int) -> None:
        if self._terminal and self._input >= 0:
            fcntl.ioctl(self._input, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def signal(self, name: str) -> None:
        """To the program's process group."""
        self._guarded.signal(signal.Signals[f"SIG{name}"])

    async def end(self) -> None:
        """Returns when nothing of the session is left."""
        self._guarded.kill()
        if not await self._guarded.wait_gone() and self._uid is not None:
            await kill_marked(self._mark, self._uid)
        self._close_all()

    def _close_all(self) -> None:
        for fd in self._ours:
            self._loop.remove_reader(fd)
            self._loop.remove_writer(fd)
            os.close(fd)
        self._ours.clear()
        self._outputs.clear()
        self._input = -1
