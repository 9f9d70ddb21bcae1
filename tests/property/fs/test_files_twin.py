"""Open files against plain bytes: whatever is done in whatever order, every read sees what was written."""

from __future__ import annotations

import asyncio
import os
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.fs.clusters.file_rig import FileRig

from fireflyer.base.units import KIB
from fireflyer.fs.client.files.asyncio_files import Files
from fireflyer.fs.client.files.open_file import File
from fireflyer.fs.client.files.open_file_table import FileOptions
from fireflyer.fs.schema.inodes import Defaults
from fireflyer.fs.schema.meta import AllocateMode

CHUNK = 64 * KIB
LONGEST = 6 * CHUNK
SMALL = FileOptions(umask=0, write_bytes=3 * CHUNK, ahead_bytes=2 * CHUNK, all_ahead_bytes=1 << 22)


class Twin:
    """One file and what must be in it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.bytes = bytearray()
        self.step = 0
        self.cursor = 0
        """Of one who reads from front to back, whatever else is done."""

    def some(self) -> bytes:
        self.step += 1
        size = self.rng.choice([1, 17, 4096, CHUNK - 5, CHUNK, 2 * CHUNK + 3])
        return bytes([self.step % 255 + 1]) * self.rng.randint(1, size)

    def place(self) -> int:
        near = self.rng.choice([0, len(self.bytes), CHUNK, 2 * CHUNK, self.rng.randrange(LONGEST)])
        return max(0, near + self.rng.choice([0, 0, -1, 1, -17]))

    def put(self, offset: int, data: bytes) -> None:
        self.bytes.extend(bytes(max(0, offset - len(self.bytes))))
        self.bytes[offset : offset + len(data)] = data

    async def go_on(self, file: File) -> None:
        """Reads, and writes what has perhaps been fetched ahead."""
        for _ in range(4):
            await self.compare(file, self.cursor, 20_000)
            self.cursor = self.cursor + 20_000 if self.cursor + 20_000 < len(self.bytes) else 0
        if self.rng.random() < 0.5:
            offset, data = self.cursor + self.rng.randrange(40_000), self.some()[:30_000]
            await file.pwrite(data, offset)
            self.put(offset, data)

    async def do(self, file: File) -> None:
        offset, what = self.place(), self.rng.random()
        if what < 0.35:
            data = self.some()
            await file.pwrite(data, offset)
            self.put(offset, data)
        elif what < 0.75:
            await self.compare(file, offset, self.rng.choice([1, 4096, CHUNK, LONGEST]))
        elif what < 0.8:
            await file.truncate(offset)
            self.bytes.extend(bytes(max(0, offset - len(self.bytes))))
            del self.bytes[offset:]
        elif what < 0.86:
            data = self.some()
            assert await file.append(data) == len(self.bytes)
            self.bytes += data
        elif what < 0.9:
            size = self.rng.randint(1, 2 * CHUNK)
            await file.allocate(AllocateMode.PUNCH_HOLE, offset, size)
            end = min(len(self.bytes), offset + size)
            self.bytes[offset:end] = bytes(max(0, end - offset))
        elif what < 0.94:
            for at in range(0, len(self.bytes), 20_000):
                await self.compare(file, at, 20_000)
        else:
            await (file.flush() if self.rng.random() < 0.5 else file.fsync())
        assert file.length == len(self.bytes)

    async def compare(self, file: File, offset: int, size: int) -> None:
        got = await file.pread(offset, size)
        assert got == self.bytes[offset : offset + size], (offset, size, len(got))


async def _made(files: Files) -> File:
    await files.mkdir("/d")
    await files.set_defaults("/d", Defaults(chunk_bytes=CHUNK, stripe=3))
    return await files.open("/d/a", "x+b")


async def one_client(seed: int) -> None:
    async with FileRig(seed) as rig:
        files, played = await rig.client(SMALL)
        twin, file = Twin(seed), await _made(files)
        for _ in range(40):
            played.held = twin.rng.random() < 0.3 and files.open_files.dirty_bytes < CHUNK
            if played.held:  # what is written meanwhile is at no storage node
                data, offset = twin.some()[:CHUNK], twin.place()
                await file.pwrite(data, offset)
                twin.put(offset, data)
                await twin.compare(file, offset, len(data))
                played.held = False
            await twin.do(file)
            await twin.go_on(file)
        await file.close()
        other, _ = await rig.client()
        async with await other.open("/d/a") as read:
            assert await read.pread(0, LONGEST * 2) == twin.bytes
        assert (await other.stat("/d/a")).st_size == len(twin.bytes)
        assert not files.open_files.dirty_bytes
        assert not files.open_files.bodies


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 1 << 32))
def test_one_client_reads_what_it_wrote(seed: int) -> None:
    asyncio.run(one_client(seed))


async def close_to_open(seed: int) -> None:
    async with FileRig(seed) as rig:
        clients = [(await rig.client(SMALL))[0] for _ in range(2)]
        twin = Twin(seed)
        await (await _made(clients[0])).close()
        for step in range(12):
            async with await clients[twin.rng.randrange(2)].open("/d/a", "r+b") as file:
                assert file.length == len(twin.bytes), step
                for _ in range(4):
                    await twin.do(file)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 1 << 32))
def test_who_opens_sees_what_was_closed(seed: int) -> None:
    asyncio.run(close_to_open(seed))


async def two_opens(seed: int) -> None:
    """Of one client: each sees at once what the other has written."""
    async with FileRig(seed) as rig:
        files, _ = await rig.client(SMALL)
        twin = Twin(seed)
        opened = [await _made(files), await files.open("/d/a", "r+b"), await files.open("/d/a")]
        for _ in range(40):
            await twin.do(opened[twin.rng.randrange(2)])
            if twin.rng.random() < 0.1:
                async with await files.open("/d/a", os.O_RDWR | os.O_TRUNC) as file:
                    twin.bytes.clear()
                    await twin.do(file)
            await twin.compare(opened[2], twin.place(), LONGEST)
        for one in opened:
            await one.close()


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 1 << 32))
def test_opens_of_one_client_share_what_is_pending(seed: int) -> None:
    asyncio.run(two_opens(seed))
