"""What an agent holds of an exec session whose ends are slow: bytes, and not frames, of which a client makes many."""

from __future__ import annotations

import asyncio
import os
import tracemalloc
from typing import Any

from fireflyer.cluster.agent.exec_process import ExecProcess
from fireflyer.cluster.agent.execs import _Session
from fireflyer.cluster.schema.execs import WINDOW_BYTES, Data, Eof, ExecOrder, ExecProgram, FramesHere

ORDER = ExecOrder(id="0" * 32, run_token="5eed5eed", user="ann", program=ExecProgram())


class Program:
    """Reads its input when `reads` is set, and writes one byte at a time."""

    def __init__(self, writes: int = 0) -> None:
        self.reads, self.readable = asyncio.Event(), asyncio.Event()
        self.read_bytes = b""
        self.ended, self.paused = asyncio.Event(), asyncio.Event()
        self.left = writes
        self.resume()

    @property
    def outputs(self) -> int:
        return 1 if self.left else 0

    async def write(self, data: bytes) -> bool:
        await self.reads.wait()
        self.read_bytes += data
        return True

    def end_input(self) -> None:
        self.ended.set()

    def read(self, _most: int) -> tuple[int, bytes]:
        self.left -= 1
        return 1, b"x"

    def pause(self) -> None:
        self.readable.clear()
        self.paused.set()

    def resume(self) -> None:
        self.readable.set()

    async def exit_code(self) -> int:
        return 0


class Manager:
    """Takes frames when `takes` is set."""

    def __init__(self) -> None:
        self.takes, self.called = asyncio.Event(), asyncio.Event()
        self.got = b""

    async def call(self, _method: Any, here: FramesHere, _limit_ns: int) -> None:
        self.called.set()
        await self.takes.wait()
        self.got += b"".join(frame.data for frame in here.frames if isinstance(frame, Data))


def session_of(manager: Manager, process: Program) -> _Session:
    session = _Session(ORDER, manager)  # type: ignore[arg-type]
    session._process = process  # type: ignore[assignment]
    session._say(session._end.start())
    return session


def test_input_in_many_small_frames_takes_no_more_than_the_window() -> None:
    async def world() -> None:
        process = Program()
        session = session_of(Manager(), process)
        writing = asyncio.ensure_future(session._write_input(process))  # type: ignore[arg-type]
        sent = 4000
        tracemalloc.start()
        for number in range(sent):
            session._hear(Data(0, number.to_bytes(4, "big")))
            session._hear(Data(0, b""))
        held_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert not session._end.over
        assert held_bytes < 2 * WINDOW_BYTES
        session._hear(Eof(0))
        process.reads.set()
        await writing
        assert process.ended.is_set()
        assert process.read_bytes == b"".join(number.to_bytes(4, "big") for number in range(sent))

    asyncio.run(world())


def test_output_in_many_small_pieces_waits_in_the_program_while_nobody_takes_it() -> None:
    async def world() -> None:
        manager, process = Manager(), Program(writes=5000)
        session = session_of(manager, process)
        sending = asyncio.ensure_future(session._send())
        reading = asyncio.ensure_future(session._read_output(process))  # type: ignore[arg-type]
        await manager.called.wait()
        await asyncio.wait({reading, asyncio.ensure_future(process.paused.wait())}, return_when=asyncio.FIRST_COMPLETED)
        assert len(session._out) <= 200
        manager.takes.set()
        await reading
        await sending
        assert manager.got == b"x" * 5000

    asyncio.run(world())


def test_errors_are_not_behind_output_without_an_end() -> None:
    """Output fills the window first, else, and a user does not see why a program prints so much."""
    (output, writer), (errors, error_writer) = os.pipe(), os.pipe()
    process = ExecProcess.__new__(ExecProcess)
    process._outputs = {1: output, 2: errors}
    os.write(writer, b"oooo")
    os.write(error_writer, b"ee")
    assert [process.read(1) for _ in range(4)] == [(1, b"o"), (2, b"e")] * 2
    for fd in (output, writer, errors, error_writer):
        os.close(fd)
