"""A copy has its final name when it is whole, goes on where it was interrupted, and takes no wrong bytes for right."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support.patience import allowed_s

from fireflyer.base.errors import Aborted, PermanentError, UsageError
from fireflyer.fs.tools import copying
from fireflyer.fs.tools.addresses import Address, parse_address
from fireflyer.fs.tools.copying import CopyOptions, copy_file, copy_link
from fireflyer.fs.tools.partial import PREFIX, Owner, Partial, alive, is_partial, key_of, me, parse_partial
from fireflyer.fs.tools.plans import CopyFile, Step, plan_copy
from fireflyer.fs.tools.running import Runner
from fireflyer.fs.tools.trees import LocalFile, LocalTree

KIB = 1 << 10
BLOCK = 16 * KIB
OPTIONS = CopyOptions(resume_bytes=64 * KIB, sync_bytes=32 * KIB)
DATA = os.urandom(200 * KIB)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "BLOCK_BYTES", BLOCK)


class Copied:
    """One copy of `source` to `target/file`: how far it came, and what was there already."""

    def __init__(self, directory: Path) -> None:
        self.source, self.place = directory / "source", directory / "target/file"
        self.place.parent.mkdir(exist_ok=True)
        self.stopped = threading.Event()
        self.advances: list[int] = []
        self.stop_at = -1

    def advanced(self, size: int) -> None:
        self.advances.append(size)
        if 0 <= self.stop_at <= sum(self.advances):
            self.stopped.set()

    def run(self, tree: LocalTree | None = None, options: CopyOptions = OPTIONS) -> None:
        self.advances.clear()
        self.stopped.clear()
        copy_file(
            LocalTree(),
            str(self.source),
            tree or LocalTree(),
            str(self.place),
            options=options,
            stopped=self.stopped,
            advanced=self.advanced,
        )

    @property
    def partials(self) -> list[str]:
        return [name for name in os.listdir(self.place.parent) if name.startswith(PREFIX)]


@pytest.fixture
def copied(tmp_path: Path) -> Copied:
    found = Copied(tmp_path)
    found.source.write_bytes(DATA)
    return found


def test_an_interrupted_copy_goes_on_where_it_ended(copied: Copied) -> None:
    copied.place.write_bytes(b"old")
    copied.stop_at = 100 * KIB
    with pytest.raises(Aborted):
        copied.run()
    assert copied.place.read_bytes() == b"old"
    (name,) = copied.partials
    partial = parse_partial(name)
    assert partial is not None
    assert partial.owner.pid == 0
    assert partial.synced_bytes == 112 * KIB
    copied.stop_at = -1
    copied.run()
    assert copied.advances[0] == partial.synced_bytes
    assert copied.place.read_bytes() == DATA
    assert not copied.partials


def test_a_small_file_that_is_interrupted_leaves_nothing(copied: Copied) -> None:
    copied.stop_at = 32 * KIB
    with pytest.raises(Aborted):
        copied.run(options=CopyOptions())
    assert os.listdir(copied.place.parent) == []


def test_bytes_that_a_crash_left_are_used_only_as_far_as_they_are_sure(copied: Copied) -> None:
    """A process that died had written further, with holes: its file says up to where it is right."""
    done = subprocess.run(
        [sys.executable, "-c", _DIES, str(copied.source), str(copied.place)], check=False, timeout=allowed_s(60)
    )
    assert done.returncode == 9
    (name,) = copied.partials
    partial = parse_partial(name)
    assert partial is not None
    assert not alive(partial.owner)
    assert partial.synced_bytes == 64 * KIB
    with open(copied.place.parent / name, "r+b") as file:
        file.seek(70 * KIB)
        file.write(b"\0" * 50 * KIB)
        file.seek(300 * KIB)
        file.write(b"longer than the source")
    copied.run()
    assert copied.advances[0] == 64 * KIB
    assert copied.place.read_bytes() == DATA
    assert not copied.partials


_DIES = """
import os, sys
from fireflyer.fs.tools import copying
from fireflyer.fs.tools.trees import LocalTree
copying.BLOCK_BYTES = 16384
done = 0
def advanced(size):
    global done
    done += size
    if done == 96 * 1024:
        os._exit(9)
options = copying.CopyOptions(resume_bytes=65536, sync_bytes=32768)
copying.copy_file(LocalTree(), sys.argv[1], LocalTree(), sys.argv[2], options=options, advanced=advanced)
"""


def test_what_another_process_is_writing_is_left_to_it(copied: Copied) -> None:
    key = key_of("file", str(copied.source), os.stat(copied.source))
    for owner in (me(7), Owner("01234567", 1, 1)):
        theirs = copied.place.parent / Partial(key, owner, 64 * KIB).name
        theirs.write_bytes(b"?" * 100 * KIB)
    copied.run()
    assert copied.advances[0] == BLOCK
    assert copied.place.read_bytes() == DATA
    assert len(copied.partials) == 2


def test_a_source_that_is_another_now_is_copied_from_the_start(copied: Copied) -> None:
    copied.stop_at = 100 * KIB
    with pytest.raises(Aborted):
        copied.run()
    copied.source.write_bytes(DATA[::-1])
    copied.stop_at = -1
    copied.run()
    assert copied.advances[0] == BLOCK
    assert copied.place.read_bytes() == DATA[::-1]


def test_a_source_that_changes_under_the_copy_is_an_error_and_nothing_is_placed(copied: Copied) -> None:
    copied.place.write_bytes(b"old")
    real = copied.advanced

    def changing(size: int) -> None:
        real(size)
        with open(copied.source, "ab") as file:
            file.write(b"more")
        os.utime(copied.source, ns=(0, sum(copied.advances)))

    copied.advanced = changing  # type: ignore[method-assign]
    with pytest.raises(PermanentError, match="changed while it was copied"):
        copied.run(options=CopyOptions())
    with pytest.raises(PermanentError, match="changed while it was copied"):
        copied.run()
    assert copied.place.read_bytes() == b"old"
    assert not copied.partials


class Full(LocalTree):
    """Takes so many bytes; `error` then, or where the file is closed."""

    def __init__(self, room: int, error: int, *, at_close: bool = False) -> None:
        super().__init__()
        self.room, self.error, self.at_close = room, error, at_close

    def open(self, path: str, mode: str = "rb", *, permissions: int = 0o666) -> LocalFile:
        file = super().open(path, mode, permissions=permissions)
        if "r" in mode and "+" not in mode:
            return file
        tree = self

        class Failing(LocalFile):
            def write(self, data: bytes | memoryview, /) -> int:  # type: ignore[override]
                tree.room -= len(data)
                if tree.room < 0 and not tree.at_close:
                    raise OSError(tree.error, os.strerror(tree.error))
                return super().write(data) or 0

            def close(self) -> None:
                failed = tree.room < 0 and tree.at_close and not self.closed
                super().close()
                if failed:
                    raise OSError(tree.error, os.strerror(tree.error))

        found = Failing(os.dup(file.fileno()), "r+")
        file.close()
        return found


@pytest.mark.parametrize("at_close", [False, True])
def test_a_full_target_keeps_nothing(copied: Copied, at_close: bool) -> None:
    copied.place.write_bytes(b"old")
    with pytest.raises(OSError, match="No space left") as caught:
        copied.run(Full(100 * KIB, errno.ENOSPC, at_close=at_close))
    assert caught.value.errno == errno.ENOSPC
    assert copied.place.read_bytes() == b"old"
    assert not copied.partials


def test_an_error_that_close_tells_places_nothing(copied: Copied) -> None:
    """Writes are taken before they are at the storage nodes, so close is where many an error comes out."""
    with pytest.raises(OSError, match="Input/output error"):
        copied.run(Full(100 * KIB, errno.EIO, at_close=True), CopyOptions())
    assert os.listdir(copied.place.parent) == []


def test_a_copy_is_nobody_elses_to_read_before_it_has_its_mode(copied: Copied) -> None:
    copied.source.chmod(0o600)
    seen = []
    copied.stop_at = -1
    real = copied.advanced

    def looking(size: int) -> None:
        real(size)
        seen.append((copied.place.parent / copied.partials[0]).stat().st_mode & 0o777)

    copied.advanced = looking  # type: ignore[method-assign]
    copied.run()
    assert set(seen) == {0o600}
    assert copied.place.stat().st_mode & 0o777 == 0o600


def test_who_may_not_give_files_away_keeps_them_without_set_user_id(copied: Copied) -> None:
    class Mine(LocalTree):
        def chown(self, path: str, uid: int, gid: int, follow: bool = True) -> None:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)

    copied.source.chmod(0o4755)
    copied.run(Mine(), CopyOptions(mode=True, owner=True))
    assert copied.place.stat().st_mode & 0o7777 == 0o755
    copied.run(options=CopyOptions(mode=True, owner=True))
    assert copied.place.stat().st_mode & 0o7777 == 0o4755


class Watching:
    def __init__(self) -> None:
        self.failures: list[tuple[str, Exception]] = []

    def advanced(self, size: int) -> None: ...
    def done(self, step: Step) -> None: ...

    def failed(self, path: str, error: Exception) -> None:
        self.failures.append((path, error))


def test_ctrl_c_leaves_no_file_half_written(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    for number in range(20):
        (tmp_path / "from" / str(number)).write_bytes(DATA)
    steps = list(plan_copy(LocalTree(), str(tmp_path / "from"), str(tmp_path / "to"), recursive=True))

    def interrupted() -> Iterator[Step]:
        yield from steps[:12]
        raise KeyboardInterrupt

    runner = Runner(LocalTree(), LocalTree(), CopyOptions(), Watching(), workers=3)
    with pytest.raises(KeyboardInterrupt):
        runner.run(interrupted())
    there = list((tmp_path / "to").iterdir())
    assert all(path.read_bytes() == DATA and not is_partial(path.name) for path in there)
    runner = Runner(LocalTree(), LocalTree(), CopyOptions(), Watching(), workers=3)
    runner.run(steps)
    assert len(list((tmp_path / "to").iterdir())) == 20
    assert runner.counts.files == 20


def test_what_is_no_error_of_one_file_ends_all_and_is_heard(tmp_path: Path) -> None:
    class Broken(LocalTree):
        def stat(self, path: str, follow: bool = True) -> os.stat_result:
            if path.endswith("/7"):
                raise RuntimeError("a defect")
            return super().stat(path, follow)

    (tmp_path / "from").mkdir()
    for number in range(20):
        (tmp_path / "from" / str(number)).touch()
    steps = list(plan_copy(LocalTree(), str(tmp_path / "from"), str(tmp_path / "to"), recursive=True))
    with pytest.raises(RuntimeError, match="a defect"):
        Runner(Broken(), LocalTree(), CopyOptions(), Watching(), workers=3).run(steps)


def test_below_a_directory_that_cannot_be_made_nothing_is_tried(tmp_path: Path) -> None:
    (tmp_path / "from/in/deep").mkdir(parents=True)
    (tmp_path / "from/in/deep/file").touch()
    (tmp_path / "from/other").touch()
    (tmp_path / "to").mkdir()
    (tmp_path / "to/in").touch()
    watching = Watching()
    runner = Runner(LocalTree(), LocalTree(), CopyOptions(), watching, workers=2)
    runner.run(plan_copy(LocalTree(), str(tmp_path / "from"), str(tmp_path / "to"), recursive=True))
    assert [path for path, _ in watching.failures] == [str(tmp_path / "from/in")]
    assert (tmp_path / "to/other").exists()


def test_unfinished_files_are_not_copied(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / Partial("0" * 24, me(1), 5).name).touch()
    (tmp_path / "from/file").touch()
    steps = list(plan_copy(LocalTree(), str(tmp_path / "from"), str(tmp_path / "to"), recursive=True))
    assert [step.path for step in steps if isinstance(step, CopyFile)] == [str(tmp_path / "from/file")]


def test_a_name_says_all_that_is_needed() -> None:
    partial = Partial("ab" * 12, Owner("01234567", 4_194_304, 2**63), 2**47)
    assert parse_partial(partial.name) == partial
    assert len(partial.name) < 128
    assert parse_partial(partial.name + "x") is None
    assert msgspec.structs.asdict(partial.free().owner) == {"host": "01234567", "pid": 0, "start": 0}


def test_this_process_is_alive_and_an_earlier_one_of_its_number_is_not() -> None:
    assert alive(me(3))
    assert not alive(msgspec.structs.replace(me(), start=1_000_000))
    assert alive(Owner("ffffffff", 1, 1)) or me().host == "ffffffff"


@pytest.mark.parametrize(
    ("url", "target", "path"),
    [
        ("ff://host:7000/data/x", "ff://host:7000", "/data/x"),
        ("ff://a:1,b:2", "ff://a:1,b:2", "/"),
        ("ff://[::1]:7/x", "ff://[::1]:7", "/x"),
        ("ff://%2Fhome%2Fann%2Ffs/a%20b#c?d", "ff:///home/ann/fs", "/a%20b#c?d"),
        ("ff:///x/y", "", "/x/y"),
        ("ff://x/y", "", "/x/y"),
        ("ff://x", "", "/x"),
        ("ff://", "", "/"),
        ("ff://a,b/*.parquet", "", "/a,b/*.parquet"),
    ],
)
def test_addresses(url: str, target: str, path: str) -> None:
    found = parse_address(url)
    assert (found.target, found.path) == (target, path)
    assert parse_address(found.prefix + found.path) == found


@pytest.mark.parametrize(
    "url", ["/x", "http://a:1/x", "ff://data:x/y", "ff://a:/x", "ff://a:0/x", "ff://a:1,/x", "ff://%41/x"]
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UsageError):
        parse_address(url)
    assert Address().target == ""


def test_a_link_that_cannot_be_made_is_told_by_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("somewhere")
    tree = LocalTree(str(tmp_path))
    with pytest.raises(FileNotFoundError) as missing:
        copy_link(tree, "/link", tree, "/none/link")
    assert missing.value.filename == "/none/link"
