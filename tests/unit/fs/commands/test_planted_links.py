"""What others plant in a directory that is copied from, or into, leads no copy out of it."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Coroutine, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.fs.clusters.file_commands import Shell, shell_over
from tests.support.fs.clusters.file_rig import FileRig, run
from tests.support.patience import allowed_s

from fireflyer.fs.client.files.asyncio_files import Files
from fireflyer.fs.client.files.file_system import FileSystem
from fireflyer.fs.schema.errors import FileError
from fireflyer.fs.tools.beneath import beneath
from fireflyer.fs.tools.copying import CopyOptions, copy_file
from fireflyer.fs.tools.partial import Owner, Partial, key_of
from fireflyer.fs.tools.plans import Step, plan_copy
from fireflyer.fs.tools.running import Runner
from fireflyer.fs.tools.trees import CopyTree, LocalEntry, LocalTree


@pytest.fixture
def ff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return shell_over(tmp_path / "remote", monkeypatch, capfdbinary)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Whose owner is attacked: what is there is neither read nor written by a copy of something else."""
    place = tmp_path / "outside"
    place.mkdir()
    (place / "secret").write_text("of the owner alone")
    return place


class Failures:
    def __init__(self) -> None:
        self.told: dict[str, Exception] = {}

    def advanced(self, size: int) -> None: ...
    def done(self, step: Step) -> None: ...

    def failed(self, path: str, error: Exception) -> None:
        self.told[path] = error


def untouched(outside: Path) -> bool:
    return {path.name: path.read_text() for path in outside.iterdir()} == {"secret": "of the owner alone"}


@pytest.mark.parametrize("verb", ["get", "put", "sync"])
def test_a_link_in_the_place_of_a_directory_of_the_target_is_not_followed(
    ff: Shell, tmp_path: Path, outside: Path, verb: str
) -> None:
    ours, theirs = (ff.root, tmp_path / "local") if verb == "get" else (tmp_path / "local", ff.root)
    for root in (ours, theirs):
        (root / "tree").mkdir(parents=True)
    (ours / "tree/sub").mkdir()
    (ours / "tree/sub/secret").write_text("replaced")
    (ours / "tree/plain").write_text("copied all the same")
    (theirs / "tree/sub").symlink_to(outside)
    words = {
        "get": ("get", "-r", "/tree", "local"),
        "put": ("put", "-r", "local/tree", "/"),
        "sync": ("sync", "local/tree", "ff:///tree"),
    }[verb]
    assert "tree/sub: " in ff(*words, code=1)
    assert untouched(outside)
    assert (theirs / "tree/plain").read_text() == "copied all the same"


def test_sync_removes_a_planted_link_and_nothing_behind_it(ff: Shell, tmp_path: Path, outside: Path) -> None:
    (tmp_path / "local/sub").mkdir(parents=True)
    (tmp_path / "local/sub/file").write_text("new")
    (ff.root / "tree").mkdir()
    (ff.root / "tree/sub").symlink_to(outside)
    (ff.root / "tree/extra").symlink_to(outside)
    ff("sync", "--delete", "local", "ff:///tree")
    assert untouched(outside)
    assert (ff.root / "tree/sub/file").read_text() == "new"
    assert not (ff.root / "tree/extra").is_symlink()


def test_the_directory_that_was_named_may_be_a_link(ff: Shell, tmp_path: Path) -> None:
    (ff.root / "tree").mkdir()
    (ff.root / "tree/file").write_text("x")
    (tmp_path / "real").mkdir()
    (tmp_path / "named").symlink_to("real")
    ff("get", "-r", "/tree", "named")
    ff("sync", "ff:///tree", "named/tree")
    assert (tmp_path / "real/tree/file").read_text() == "x"
    (ff.root / "way").symlink_to("tree")
    ff("put", "-r", "named/", "/way")
    assert (ff.root / "tree/named/tree/file").read_text() == "x"


def swapped(tree: Path, outside: Path) -> None:
    """What somebody who may write in it does between the plan and a step of it."""
    (tree / "sub").rename(tree / "aside")
    (tree / "sub").symlink_to(outside)


def test_a_link_that_is_planted_after_the_plan_is_not_read_through(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "from/sub").mkdir(parents=True)
    (tmp_path / "from/sub/secret").write_text("public")
    (tmp_path / "to").mkdir()
    failures = Failures()
    with beneath(LocalTree(), str(tmp_path / "from")) as source, beneath(LocalTree(), str(tmp_path / "to")) as target:
        steps = list(plan_copy(source, str(tmp_path / "from"), str(tmp_path / "to/copy"), recursive=True))
        swapped(tmp_path / "from", outside)
        Runner(source, target, CopyOptions(), failures, workers=1).run(steps)
    assert not (tmp_path / "to/copy/sub/secret").exists()
    error = failures.told[str(tmp_path / "from/sub/secret")]
    assert isinstance(error, OSError)
    assert (error.errno, error.filename) == (errno.ELOOP, str(tmp_path / "from/sub/secret"))


def test_a_link_that_is_planted_after_the_plan_is_not_written_through(tmp_path: Path, outside: Path) -> None:
    for root in ("from", "to/copy"):
        (tmp_path / root / "sub").mkdir(parents=True)
    (tmp_path / "from/sub/secret").write_text("replaced")
    failures = Failures()
    with beneath(LocalTree(), str(tmp_path / "from")) as source, beneath(LocalTree(), str(tmp_path / "to")) as target:
        steps = list(plan_copy(source, str(tmp_path / "from"), str(tmp_path / "to/copy"), recursive=True))
        swapped(tmp_path / "to/copy", outside)
        Runner(source, target, CopyOptions(mode=True, times=True, owner=True), failures, workers=1).run(steps)
    assert untouched(outside)
    assert outside.stat().st_mode & 0o777 == 0o755
    assert failures.told


def test_a_pipe_in_the_place_of_a_file_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    os.mkfifo(tmp_path / "from/file")
    with beneath(LocalTree(), str(tmp_path / "from")) as tree, pytest.raises(OSError, match="not a regular file"):
        tree.open(str(tmp_path / "from/file"))


@pytest.mark.parametrize("name", ["../secret", "..", "sub/../../secret", "", "/etc/motd"])
def test_a_name_that_leads_out_is_refused(tmp_path: Path, outside: Path, name: str) -> None:
    """Whatever the other side tells: a listing of a cluster is what its services say."""

    class Hostile(LocalTree):
        def scandir(self, path: str) -> Iterable[LocalEntry]:  # type: ignore[override]
            if path == str(tmp_path / "from"):
                return [LocalEntry(name, os.stat(tmp_path / "from/file"))]
            return super().scandir(path)

        def open(self, path: str, mode: str = "rb", *, permissions: int = 0o666) -> Any:
            return super().open(str(tmp_path / "from/file"), mode, permissions=permissions)

        def stat(self, path: str, follow: bool = True) -> os.stat_result:
            return super().stat(path if path == str(tmp_path / "from") else str(tmp_path / "from/file"), follow)

    (tmp_path / "from").mkdir()
    (tmp_path / "from/file").write_text("planted")
    inside = outside / "inside"
    inside.mkdir()
    failures = Failures()
    with beneath(LocalTree(), str(inside)) as target:
        steps = plan_copy(Hostile(), str(tmp_path / "from"), str(inside / "copy"), recursive=True)
        Runner(Hostile(), target, CopyOptions(), failures, workers=1).run(steps)
    assert (outside / "secret").read_text() == "of the owner alone"
    assert [path.name for path in inside.rglob("*")] == ["copy"]
    assert len(failures.told) == 1


@pytest.mark.parametrize("kind", ["symlink", "hard link"])
def test_a_link_under_the_name_of_an_unfinished_copy_is_not_written_through(
    tmp_path: Path, outside: Path, kind: str
) -> None:
    data = os.urandom(100_000)
    (tmp_path / "source").write_bytes(data)
    target = tmp_path / "to"
    target.mkdir()
    victim = outside / "secret"
    victim.write_bytes(b"v" * 100_000)
    key = key_of("file", str(tmp_path / "source"), os.stat(tmp_path / "source"))
    planted = target / Partial(key, Owner("0" * 8, 0, 0), 50_000).name
    planted.symlink_to(victim) if kind == "symlink" else os.link(victim, planted)
    with beneath(LocalTree(), str(target)) as tree:
        options = CopyOptions(resume_bytes=1, sync_bytes=32_768)
        copy_file(LocalTree(), str(tmp_path / "source"), tree, str(target / "file"), options=options)
    assert victim.read_bytes() == b"v" * 100_000
    assert (target / "file").read_bytes() == data
    assert not (target / "file").is_symlink()


def test_set_user_id_is_kept_only_with_the_owner(ff: Shell, tmp_path: Path) -> None:
    """A program of somebody else would act as who has copied it."""
    (ff.root / "tree").mkdir()
    (ff.root / "tree/program").write_text("#!/bin/sh\n")
    (ff.root / "tree/program").chmod(0o4755)
    ff("sync", "ff:///tree", "copy")
    assert (tmp_path / "copy/program").stat().st_mode & 0o7777 == 0o755
    assert "0 files" in ff("sync", "ff:///tree", "copy")
    (tmp_path / "planted").touch()
    (tmp_path / "planted").chmod(0o4777)
    ff("get", "/tree/program", "planted")
    assert (tmp_path / "planted").stat().st_mode & 0o7777 == 0o777


def of_threads(files: Files) -> FileSystem:
    """The blocking file system over the coroutines of this loop, for other threads."""
    loop = asyncio.get_running_loop()

    def wait(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(allowed_s(60))

    engine: Any = SimpleNamespace(run=wait, close=lambda: None)
    return FileSystem(engine, files, lambda: None)


def test_in_a_cluster_a_planted_link_is_followed_neither_on_the_way_nor_at_the_end() -> None:
    async def test(rig: FileRig) -> None:
        files, _ = await rig.client()
        for path in ("/shared", "/shared/tree", "/shared/tree/sub", "/home"):
            await files.mkdir(path)
        for path in ("/home/secret", "/shared/tree/sub/file"):
            async with await files.open(path, "wb"):
                pass
        await files.symlink("/home", "/shared/tree/planted")
        await files.symlink("/home/secret", "/shared/tree/link")
        await files.symlink("/shared", "/way")
        await asyncio.to_thread(attacked, of_threads(files))
        assert [one.name async for one in files.scandir("/home")] == ["secret"]
        assert (await files.stat("/home/secret")).st_mode & 0o777 == 0o666

    run(test)


def attacked(files: FileSystem) -> None:
    with beneath(files, "/way/tree") as tree:
        assert tree.stat("/way/tree/sub/file").st_size == 0
        assert [one.name for one in tree.scandir("/way/tree")] == ["link", "planted", "sub"]
        assert_refused(tree)
        tree.rename("/way/tree/sub/file", "/way/tree/sub/other")
        tree.symlink("/home", "/way/tree/sub/new")
        assert tree.readlink("/way/tree/sub/new") == "/home"
        files.rename("/shared/tree/sub", "/shared/tree/aside")
        files.symlink("/home", "/shared/tree/sub")
        tree.mkdir("/way/tree/sub/made")  # in the directory that it was
        assert files.stat("/shared/tree/aside/made").is_dir()


def assert_refused(tree: CopyTree) -> None:
    for path in ("/way/tree/planted/secret", "/way/tree/planted/new"):
        with pytest.raises(OSError, match="symbolic link"):
            tree.mkdir(path)
        with pytest.raises(OSError, match="symbolic link"):
            tree.stat(path)
    with pytest.raises(FileError) as caught:
        tree.open("/way/tree/link", "wb")
    assert caught.value.errno == errno.ELOOP
    with pytest.raises(OSError, match="leads out"):
        tree.stat("/way/tree/../x")
    tree.utime("/way/tree/link", ns=(1, 1))
