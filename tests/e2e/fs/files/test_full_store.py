"""A full disk under the store of names: removing and collecting go on, and then there is room again."""

from __future__ import annotations

import asyncio
import errno
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.fs.clusters.meta_service import MetaRig, expect
from tests.support.patience import allowed_s

from fireflyer.fs.schema.inodes import ROOT
from fireflyer.fs.schema.meta import (
    ClientHeartbeat,
    Done,
    ErrorReply,
    Found,
    MakeDirectory,
    PathRef,
    RemoveDirectory,
    SetXattr,
)
from fireflyer.kvstore.embedded import EmbeddedEngine

FILE_BYTES = 14 << 20


@pytest.mark.slow
def test_on_a_full_disk_names_can_be_removed_and_then_made_again(tmp_path: Path) -> None:
    """The kernel refuses to let the file grow, as a full disk does."""
    command = [sys.executable, "-c", f"from {__name__} import main; main()", str(tmp_path / "store")]
    root = Path(__file__).parents[4]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=allowed_s(100))
    assert done.returncode == 0, (done.stdout, done.stderr)


def main() -> None:
    asyncio.run(_story(sys.argv[1]))


async def _story(path: str) -> None:
    async with EmbeddedEngine(path) as kv, MetaRig(kv) as rig:
        await rig.open_session(5)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, before[1]))
        count = await _fill(rig)
        assert count > 20
        for number in range(count):
            assert await rig.ask(5, RemoveDirectory(_place(number))) == Done()
        await _collected(rig)
        for number in range(20):
            expect(await rig.ask(5, MakeDirectory(_place(number))), Found)
            assert await rig.ask(5, SetXattr(_place(number), b"user.big", bytes(60_000))) == Done()
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _place(number: int) -> PathRef:
    return PathRef(ROOT, b"d%d" % number)


async def _fill(rig: MetaRig) -> int:
    """Until there is no space, which is said with the right number; how many names were made."""
    sizes = [60_000, 1000]  # many pages side by side, which are not to be had first; then a part of a page
    for number in range(5000):
        made = await rig.ask(5, MakeDirectory(_place(number)))
        if isinstance(made, ErrorReply):
            assert made.errno == errno.ENOSPC
            return number
        expect(made, Found)
        if sizes:
            put = await rig.ask(5, SetXattr(_place(number), b"user.big", bytes(sizes[0])))
            if put != Done():
                assert expect(put, ErrorReply).errno == errno.ENOSPC
                del sizes[0]
    raise AssertionError("it is never full")


async def _collected(rig: MetaRig) -> None:
    for beat in range(300):
        assert await rig.ask(5, ClientHeartbeat(beat + 1)) == Done()
        page = await rig.engine.read(lambda reader: reader.get_range(b"FV", b"FW", limit=1))
        if not page.items:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(rig.service.last_error)
