"""fsspec's own tests of a file system, and what they do not ask, over a directory of this machine."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import fsspec.tests.abstract as abstract
import pytest

from fireflyer.base.errors import UsageError
from fireflyer.fs import spec
from fireflyer.fs.spec import FireflyerFileSystem
from fireflyer.fs.tools import connections
from fireflyer.fs.tools.default_cluster import TARGET_VARIABLE
from fireflyer.fs.tools.trees import LocalFile, LocalTree


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FireflyerFileSystem]:
    root = tmp_path / "remote"
    root.mkdir()
    monkeypatch.setattr(connections, "_connect", lambda *_: LocalTree(str(root)))
    yield FireflyerFileSystem(target="ff://here:1", skip_instance_cache=True)
    connections._shared.clear()


class OverADirectory(abstract.AbstractFixtures):
    @pytest.fixture
    def fs(self, files: FireflyerFileSystem) -> FireflyerFileSystem:
        return files

    @pytest.fixture
    def fs_join(self) -> Callable[..., str]:
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def fs_path(self) -> str:
        return "/data"


class TestCopy(abstract.AbstractCopyTests, OverADirectory): ...


class TestGet(abstract.AbstractGetTests, OverADirectory): ...


class TestPut(abstract.AbstractPutTests, OverADirectory): ...


class TestOpen(abstract.AbstractOpenTests, OverADirectory): ...


class TestPipe(abstract.AbstractPipeTests, OverADirectory): ...


def test_files_that_are_written_can_be_read_in_all_ways(files: FireflyerFileSystem) -> None:
    files.pipe("/a/b/data", bytes(range(256)) * 40)
    assert files.cat_file("/a/b/data", 10, 20) == bytes(range(10, 20))
    assert files.cat_file("/a/b/data", -3) == bytes([253, 254, 255])
    assert files.cat_file("/a/b/data", 250, -9990) == b""
    assert files.tail("/a/b/data", 2) == bytes([254, 255])
    with files.open("/a/b/data") as file:
        assert file.size == 10240
        assert file.seek(-256, os.SEEK_END) == 9984
        assert file.read(3) == b"\0\1\2"
        buffer = bytearray(5)
        assert file.readinto(buffer) == 5
        assert bytes(buffer) == bytes(range(3, 8))
        assert file.read() == bytes(range(8, 256))
        assert file.read() == b""
        with pytest.raises(io.UnsupportedOperation):
            file.write(b"x")


def test_text_lines_and_compression(files: FireflyerFileSystem) -> None:
    with files.open("/text.gz", "wt", compression="infer", encoding="utf-8") as file:
        file.writelines(f"ligne {number} é\n" for number in range(1000))
    with files.open("/text.gz", "rt", compression="infer", encoding="utf-8") as file:
        assert [line.split()[1] for line in file] == [str(number) for number in range(1000)]
    files.pipe("/lines", b"one\ntwo\nthree")
    with files.open("/lines") as file:
        assert file.readline() == b"one\n"
        assert list(file) == [b"two\n", b"three"]


def test_writing_inside_and_at_the_end(files: FireflyerFileSystem) -> None:
    files.pipe("/x", b"0123456789")
    with files.open("/x", "r+b") as file:
        file.seek(3)
        file.write(b"abc")
    with files.open("/x", "ab") as file:
        file.write(b"end")
    assert files.cat("/x") == b"012abc6789end"


def test_many_ranges_are_read_together_and_errors_stand_in_their_places(files: FireflyerFileSystem) -> None:
    files.pipe({"/a": bytes(100), "/b": b"b" * 100})
    found = files.cat_ranges(["/a", "/b", "/none", "/b"], [0, 98, 0, None], [2, 200, 5, 3])
    assert found[0] == b"\0\0"
    assert found[1] == b"bb"
    assert isinstance(found[2], FileNotFoundError)
    assert found[3] == b"bbb"
    with pytest.raises(FileNotFoundError):
        files.cat_ranges(["/none"], 0, 5, on_error="raise")


def test_a_transaction_places_all_of_its_files_or_none(files: FireflyerFileSystem) -> None:
    with files.transaction:
        files.pipe("/t/one", b"1")
        files.pipe("/t/two", b"2")
        assert not files.exists("/t/one")
    assert files.cat(["/t/one", "/t/two"]) == {"/t/one": b"1", "/t/two": b"2"}
    with contextlib.suppress(KeyError), files.transaction:
        files.pipe("/t/one", b"other")
        raise KeyError
    assert files.cat("/t/one") == b"1"
    assert files.ls("/t", detail=False) == ["/t/one", "/t/two"]


def test_links_are_followed_but_no_walk_goes_round_in_them(files: FireflyerFileSystem) -> None:
    files.pipe("/d/file", b"12345")
    files.symlink("file", "/d/link")
    files.symlink("../d", "/d/round")
    files.symlink("nothing", "/d/broken")
    kinds = {one["name"]: (one["type"], one["size"], one["islink"]) for one in files.ls("/d")}
    assert kinds["/d/link"] == ("file", 5, True)
    assert kinds["/d/round"][0] == kinds["/d/broken"][0] == "other"
    assert files.isdir("/d/round")
    assert files.cat("/d/round/link") == b"12345"
    assert not files.exists("/d/broken")
    assert files.lexists("/d/broken")
    assert len(files.find("/")) == 4
    files.rm("/d/round")
    files.rm("/d", recursive=True)
    assert files.ls("/") == []


def test_moving_replaces_and_moves_into_directories(files: FireflyerFileSystem) -> None:
    files.pipe({"/m/a": b"a", "/m/b": b"b", "/m/in/c": b"c"})
    files.mv("/m/a", "ff://here:1/m/b")
    assert files.cat("/m/b") == b"a"
    files.mv("/m/b", "/m/in")
    assert files.cat("/m/in/b") == b"a"
    files.mv("/m/in", "/m/new/name", recursive=True)
    assert files.find("/m") == ["/m/new/name/b", "/m/new/name/c"]
    files.mv("/m/new/name/*", "/m/flat/")
    assert files.find("/m") == ["/m/flat/b", "/m/flat/c"]
    with pytest.raises(IsADirectoryError):
        files.rm("/m")


def test_what_is_written_whole_is_never_seen_in_part(files: FireflyerFileSystem, tmp_path: Path) -> None:
    (tmp_path / "local").write_bytes(b"x" * 100)
    files.put_file(str(tmp_path / "local"), "/p/x")
    with pytest.raises(FileExistsError):
        files.put_file(str(tmp_path / "local"), "/p/x", mode="create")
    files.get_file("/p/x", str(tmp_path / "sub/back"))
    assert (tmp_path / "sub/back").read_bytes() == b"x" * 100
    assert os.listdir(tmp_path / "sub") == ["back"]
    assert files.ls("/p", detail=False) == ["/p/x"]


def test_times_and_modes(files: FireflyerFileSystem) -> None:
    files.touch("/x")
    before = files.modified("/x")
    assert before.tzinfo is not None
    files.touch("/x", truncate=False)
    assert files.modified("/x") >= before
    files.chmod("/x", 0o600)
    assert files.info("/x")["mode"] & 0o777 == 0o600
    assert files.ukey("/x") == files.ukey("/x")


def test_urls_name_their_cluster(files: FireflyerFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, path = fsspec.core.url_to_fs("ff://here:1,there:2/a/b")
    assert (found._target, path) == ("ff://here:1,there:2", "/a/b")
    assert found.unstrip_protocol(path) == "ff://here:1,there:2/a/b"
    found, path = fsspec.core.url_to_fs("ff://%2Fhome%2Fann%2Ffs/a")
    assert found.unstrip_protocol(path) == "ff://%2Fhome%2Fann%2Ffs/a"
    assert found._target == "ff:///home/ann/fs"
    found, _ = fsspec.core.url_to_fs("ff:///a", target="ff:///home/ann/fs")
    assert found._target == "ff:///home/ann/fs"
    assert pickle.loads(pickle.dumps(found)) == found
    monkeypatch.delenv(TARGET_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no cluster is named"):
        fsspec.core.url_to_fs("ff:///b")
    (tmp_path / "fs").mkdir()
    (tmp_path / "fs/cluster.json").touch()
    found, path = fsspec.core.url_to_fs("ff://runs/first/x.zarr")
    assert (found._target, path) == (f"ff://{tmp_path}/fs", "/runs/first/x.zarr")
    FireflyerFileSystem.clear_instance_cache()
    monkeypatch.setenv(TARGET_VARIABLE, "ff://there:2")
    assert fsspec.filesystem("ff").unstrip_protocol("/x") == "ff://there:2/x"
    FireflyerFileSystem.clear_instance_cache()


class Crowded(LocalTree):
    """Others make or remove the directory of a file at the very moment when it is missing, or there again."""

    def __init__(self, root: str, others: list[Callable[[], None]]) -> None:
        super().__init__(root)
        self.others = others
        self.opened = 0

    def open(self, path: str, mode: str = "rb", *, permissions: int = 0o666) -> LocalFile:
        self.opened += 1
        try:
            return super().open(path, mode, permissions=permissions)
        except FileNotFoundError:
            if self.others:
                self.others.pop(0)()
            raise


def crowded(root: Path, monkeypatch: pytest.MonkeyPatch, *others: Callable[[], None]) -> FireflyerFileSystem:
    tree = Crowded(str(root), list(others))
    monkeypatch.setattr(connections, "_connect", lambda *_: tree)
    connections._shared.clear()
    return FireflyerFileSystem(target="ff://crowded:1", skip_instance_cache=True)


def test_a_directory_that_another_writer_makes_in_the_meantime_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = crowded(tmp_path, monkeypatch, lambda: (tmp_path / "array").mkdir())
    fs.pipe_file("/array/0.0", b"x")
    assert (tmp_path / "array/0.0").read_bytes() == b"x"
    connections._shared.clear()


def test_a_directory_that_another_one_removes_is_made_again_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = crowded(tmp_path, monkeypatch)
    real = LocalTree.makedirs

    def fleeting(tree: LocalTree, path: str, *, exist_ok: bool = False) -> None:
        """Nobody ever finds it."""

    monkeypatch.setattr(LocalTree, "makedirs", fleeting)
    with pytest.raises(FileNotFoundError):
        fs.pipe_file("/none/x", b"x")
    assert isinstance(fs.files, Crowded)
    assert fs.files.opened == spec.MAX_ATTEMPTS
    monkeypatch.setattr(LocalTree, "makedirs", real)
    fs.pipe_file("/none/x", b"x")
    assert (tmp_path / "none/x").read_bytes() == b"x"
    connections._shared.clear()


def test_what_is_missing_for_another_reason_is_an_error(files: FireflyerFileSystem, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.put_file(str(tmp_path / "none"), "/new/file")
    with pytest.raises(FileNotFoundError):
        files.mv("/none", "/new/file")


def test_many_writers_into_directories_that_nobody_has_made(files: FireflyerFileSystem) -> None:
    """As zarr writes the chunks of an array."""
    with ThreadPoolExecutor(8) as pool:
        paths = [f"/array/{shard}/c/{chunk}" for shard in range(25) for chunk in range(8)]
        list(pool.map(lambda path: files.pipe_file(path, path.encode()), paths))
    assert all(files.cat_file(path) == path.encode() for path in paths)


def test_threads_share_one_connection(files: FireflyerFileSystem) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: fsspec.filesystem("ff", target="ff://here:1").files, range(4)))
    assert all(one is found[0] for one in found)
    assert files.files is found[0]
