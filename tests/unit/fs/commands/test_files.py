"""`ff fs ls`, `cp`, `rm` and the others do what users know of coreutils."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest
from tests.support.fs.clusters.file_commands import Shell, content_of, shell_over

from fireflyer.base.errors import UsageError
from fireflyer.cli.fs.connect import target_of
from fireflyer.cli.fs.files.show import size_text
from fireflyer.fs.tools import beneath
from fireflyer.fs.tools.default_cluster import default_target
from fireflyer.fs.tools.partial import Partial, me


@pytest.fixture
def ff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return shell_over(tmp_path / "remote", monkeypatch, capfdbinary)


def fill(root: Path) -> None:
    (root / "a").mkdir(parents=True)
    (root / "a/one").write_bytes(b"1" * 100)
    (root / "a/two").write_bytes(b"2" * 3000)
    (root / "a/.hidden").write_bytes(b"")
    (root / "a/deep/er").mkdir(parents=True)
    (root / "a/deep/er/three").write_bytes(b"3")
    (root / "a/link").symlink_to("one")
    os.link(root / "a/one", root / "a/deep/same")


def coreutils(*words: str, root: Path) -> list[str]:
    done = subprocess.run(
        words, cwd=root, capture_output=True, text=True, check=True, env={"LC_ALL": "C", "PATH": os.environ["PATH"]}
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "options", [(), ("-a",), ("-r",), ("-S",), ("-t",), ("-R",), ("-d",), ("-1",)], ids=lambda options: "".join(options)
)
def test_ls_lists_as_ls_does(ff: Shell, options: tuple[str, ...]) -> None:
    fill(ff.root)
    for at, path in enumerate(sorted(ff.root.rglob("*"))):
        os.utime(path, (at * 7 % 11 * 1000,) * 2, follow_symlinks=False)
    wanted = coreutils("ls", *(("-A",) if options == ("-a",) else options), "a", root=ff.root)
    assert [line.replace("/a", "a", 1) for line in ff.lines("ls", *options, "/a")] == wanted


def test_ls_long_says_who_how_much_and_when(ff: Shell) -> None:
    fill(ff.root)
    os.utime(ff.root / "a/two", (0, 86400 * 365))
    lines = {line.split()[7]: line.split() for line in ff.lines("ls", "-l", "-h", "-n", "/a")}
    status = (ff.root / "a/two").stat()
    assert lines["two"][:5] == ["-rw-r--r--", "1", str(status.st_uid), str(status.st_gid), "3.0K"]
    assert lines["two"][5] == "1971-01-01"
    assert lines["link"][0] == "lrwxrwxrwx"
    assert lines["link"][-2:] == ["->", "one"]
    assert lines["deep"][0].startswith("d")
    assert lines["one"][1] == "2"


@pytest.mark.parametrize("size", [0, 1023, 1024, 1025, 10137, 10240, 10241, 1048575, 1048576, 10 << 30, (1 << 40) + 1])
def test_sizes_are_as_ls_writes_them(size: int, tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        file.truncate(size)
    assert coreutils("ls", "-lh", "file", root=tmp_path)[0].split()[4] == size_text(size, True)


def test_several_directories_are_titled_and_what_is_not_there_does_not_stop_the_others(ff: Shell) -> None:
    fill(ff.root)
    (ff.root / "b").mkdir()
    assert ff.lines("ls", "/a/one", "/b", "/a/deep") == ["/a/one", "", "/b:", "", "/a/deep:", "er", "same"]
    assert ff("ls", "/none", "/a", code=1) == "error: /none: no such file or directory\n"


def test_names_that_would_act_on_a_terminal_are_plain_elsewhere(ff: Shell) -> None:
    name = os.fsdecode(b"\x1b[31m\xff")
    (ff.root / name).touch()
    assert ff("ls", "/") == name + "\n"


def test_cat_writes_bytes_and_stat_knows_all(ff: Shell) -> None:
    fill(ff.root)
    assert ff("cat", "/a/one", "/a/deep/er/three") == "1" * 100 + "3"
    assert ff("cat", "/a", "/a/none", code=1).count("error: /a") == 2
    text = ff("stat", "/a/link")
    assert "/a/link -> one" in text
    assert "symbolic link" in text
    assert '"size":100' in ff("stat", "-L", "--json", "/a/link")


@pytest.mark.parametrize("options", [(), ("-s",), ("-a",), ("-c",), ("-d", "1"), ("--inodes",), ("-a", "-d", "1")])
def test_du_sums_as_du_does(ff: Shell, options: tuple[str, ...]) -> None:
    """But for the bytes of directories themselves, which are a matter of the file system below."""
    fill(ff.root)
    (ff.root / "a/deep/same").unlink()
    ours = {line.split("\t")[1]: int(line.split("\t")[0]) for line in ff.lines("du", "-b", *options, "/a")}
    rows = [line.split("\t") for line in coreutils("du", "-b", *options, "a", root=ff.root)]
    theirs = {(name if name == "total" else f"/{name}"): int(size) for size, name in rows}
    if "--inodes" not in options:
        for name in theirs:
            below = ff.root if name == "total" else ff.root / name[1:]
            if below.is_dir() and not below.is_symlink():
                inside = [below / "a"] if name == "total" else [below]
                own = [one for top in inside for one in (top, *top.rglob("*")) if one.is_dir() and not one.is_symlink()]
                theirs[name] -= sum(one.stat().st_size for one in own)
    assert ours == theirs


def test_du_counts_a_file_with_two_names_once(ff: Shell) -> None:
    fill(ff.root)
    assert ff("du", "-sb", "/a") == "3104\t/a\n"
    assert ff("du", "-b", "/a/one", "/a/deep/same") == "100\t/a/one\n0\t/a/deep/same\n"


def test_df_shows_room_and_use(ff: Shell) -> None:
    title, row = ff.lines("df", "-h", "/")
    assert title.split() == ["Size", "Used", "Avail", "Use%", "Path"]
    assert row.split()[-1] == "/"
    assert ff.lines("df", "-i")[0].split()[0] == "Inodes"


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("-name", "*e*"),
        ("-iname", "ONE"),
        ("-type", "f"),
        ("-type", "d,l"),
        ("-size", "+1k"),
        ("-size", "-2"),
        ("-size", "100c"),
        ("-empty",),
        ("-mtime", "+3"),
        ("-mtime", "-2"),
        ("-mmin", "+10"),
        ("-path", "*deep*"),
        ("-maxdepth", "1"),
        ("-mindepth", "2"),
        ("-newer", "/a/two"),
    ],
    ids="_".join,
)
def test_find_finds_what_find_finds(ff: Shell, words: tuple[str, ...]) -> None:
    fill(ff.root)
    os.utime(ff.root / "a/two", (0, (ff.root / "a").stat().st_mtime - 86400 * 5))
    theirs = list(words)
    if "-type" in words:
        kinds = words[1].split(",")
        theirs = ["(", *" -o ".join(f"-type {kind}" for kind in kinds).split(), ")"]
    if "-newer" in words:
        theirs = ["-newer", "a/two"]
    wanted = sorted(coreutils("find", "a", *theirs, root=ff.root))
    assert sorted(line[1:] for line in ff.lines("find", "/a", *words)) == wanted


def test_find_writes_zeros_between_names(ff: Shell) -> None:
    fill(ff.root)
    assert ff("find", "/a/deep", "-print0").split("\0")[:2] == ["/a/deep", "/a/deep/er"]


def test_touch_makes_empty_files_and_sets_times_of_what_is_there(ff: Shell) -> None:
    (ff.root / "old").write_bytes(b"kept")
    (ff.root / "directory").mkdir()
    (ff.root / "dangling").symlink_to("made")
    for name in ("old", "directory"):
        os.utime(ff.root / name, (0, 0))
    assert ff("touch", "/old", "/new", "/directory/", "/dangling") == ""
    assert content_of(ff.root) == {"dangling": "made", "directory": None, "made": b"", "new": b"", "old": b"kept"}
    for name in ("old", "directory"):
        status = (ff.root / name).stat()
        assert status.st_mtime > 0
        assert status.st_atime > 0


def test_touch_goes_on_with_the_other_paths(ff: Shell) -> None:
    (ff.root / "file").write_bytes(b"")
    assert ff("touch", "/none/new", "/missing/", "/file/", "/new", code=1).splitlines() == [
        "error: /none/new: no such file or directory",
        "error: /missing: no such file or directory",
        "error: /file/: not a directory",
    ]
    assert sorted(content_of(ff.root)) == ["file", "new"]


def test_touch_without_creating_leaves_missing_files_missing(ff: Shell) -> None:
    assert ff("touch", "--no-create", "/none", "/none/deep", "/none/") == ""
    assert content_of(ff.root) == {}


def test_mkdir_makes_what_is_missing(ff: Shell) -> None:
    assert "no such file" in ff("mkdir", "/x/y", code=1)
    assert ff("mkdir", "-p", "-v", "/x/y/z") == "/x/y/z: made\n"
    assert ff("mkdir", "-p", "/x/y/z") == ""
    assert "file exists" in ff("mkdir", "/x", code=1)
    ff("mkdir", "-m", "2750", "/m")
    assert oct((ff.root / "m").stat().st_mode)[-4:] == "2750"
    assert "not an octal mode" in ff("mkdir", "-m", "9", "/n", code=2)


def test_rm_removes_only_what_it_may(ff: Shell) -> None:
    fill(ff.root)
    assert ff("rm", "/a", code=1) == "error: /a: is a directory; -r removes it with all it contains\n"
    assert "the root" in ff("rm", "-r", "/", code=2)
    assert "no such file" in ff("rm", "/none", code=1)
    assert ff("rm", "-f", "/none") == ""
    ff("rm", "/a/link", "-v")
    assert (ff.root / "a/one").exists()
    assert "not empty" in ff("rm", "-d", "/a", code=1)
    ff("rm", "-r", "/a")
    assert not (ff.root / "a").exists()


def test_mv_renames_and_moves_into_directories(ff: Shell) -> None:
    fill(ff.root)
    ff("mv", "/a/one", "/a/uno")
    ff("mv", "/a/uno", "/a/two", "/a/deep")
    assert {"uno", "two"} <= set(os.listdir(ff.root / "a/deep"))
    assert "file exists" in ff("mv", "-n", "/a/deep/uno", "/a/deep/same", code=1)
    ff("mv", "/a/deep/uno", "/a/deep/two")
    assert (ff.root / "a/deep/two").read_bytes() == b"1" * 100
    assert "not a directory, and several sources need one" in ff("mv", "/a/deep/two", "/a/link", "/a/nowhere", code=2)
    assert "no such file" in ff("mv", "/none", "/a", code=1)
    missing = ff("mv", "/a/two", "/a/deep/two", "/none/x", code=2)
    assert missing.startswith("error: /none/x is not a directory, and several sources need one; create it first")
    assert ff("mv", "/a/deep/two", "/none/x", code=1).startswith("error: /a/deep/two -> /none/x: no such file")
    assert "only one path is given ('/a')" in ff("mv", "/a", code=2)


def test_cp_copies_files_and_trees(ff: Shell) -> None:
    fill(ff.root)
    ff("cp", "/a/one", "/b")
    ff("cp", "/a/two", "/b")
    assert (ff.root / "b").read_bytes() == b"2" * 3000
    assert "-r copies it" in ff("cp", "/a", "/c", code=1)
    ff("cp", "-r", "-p", "/a", "/c")
    assert content_of(ff.root / "c") == content_of(ff.root / "a")
    assert (ff.root / "c/two").stat().st_mtime_ns == (ff.root / "a/two").stat().st_mtime_ns
    ff("cp", "-r", "/a", "/c")
    assert content_of(ff.root / "c/a") == content_of(ff.root / "a")
    (ff.root / "b").write_bytes(b"mine")
    ff("cp", "-n", "/a/two", "/b")
    assert (ff.root / "b").read_bytes() == b"mine"


def test_cp_never_copies_a_thing_onto_or_into_itself(ff: Shell) -> None:
    fill(ff.root)
    assert "same" in ff("cp", "/a/one", "/a/one", code=2)
    assert "/a/one and /a/link are the same file" in ff("cp", "/a/one", "/a/link", code=2)
    assert "/a/one and /a/deep/same are the same file" in ff("cp", "/a/one", "/a/deep/same", code=2)
    assert "inside" in ff("cp", "-r", "/a", "/a/deep/er/b", code=2)
    assert "inside" in ff("cp", "-r", "/a", "/a/deep", code=2)
    (ff.root / "other").symlink_to("a/deep")
    assert "inside" in ff("cp", "-r", "/a", "/other", code=2)
    assert (ff.root / "a/one").read_bytes() == b"1" * 100


def test_put_and_get_bring_everything_back(ff: Shell, tmp_path: Path) -> None:
    fill(tmp_path / "here")
    assert ff("put", "-r", "-p", "here/a", "/up") == ""
    assert content_of(ff.root / "up") == content_of(tmp_path / "here/a")
    (tmp_path / "back").mkdir()
    ff("get", "-r", "-p", "/up", "back")
    assert content_of(tmp_path / "back/up") == content_of(tmp_path / "here/a")
    assert "no such file" in ff("put", "none", "/", code=1)
    assert "not a path in the cluster" in ff("put", "here", "up", code=2)


def test_one_file_that_cannot_be_copied_does_not_stop_the_others(ff: Shell, tmp_path: Path) -> None:
    fill(tmp_path / "here")
    os.mkfifo(tmp_path / "here/a/fifo")
    (ff.root / "up/two").mkdir(parents=True)
    (ff.root / "up/deep").touch()
    text = ff("put", "-r", "-q", "here/a", "here/a/one", "/up", code=1)
    assert "fifo: neither file" in text
    text = ff("cp", "-r", "/up/a", "/upper", code=0)
    text = ff("put", "-r", "here/a/one", "here/a/two", "/up", code=1)
    assert text == "error: /up/two: the target is a directory\n"
    assert not [name for name in os.listdir(ff.root / "up") if name.startswith(".ff")]


def test_the_mode_of_a_copy_is_as_cp_makes_it(ff: Shell, tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        (tmp_path / "run").write_bytes(b"x")
        (tmp_path / "run").chmod(0o777)
        ff("put", "run", "/run")
        assert oct((ff.root / "run").stat().st_mode)[-3:] == "750"
        (ff.root / "run").chmod(0o600)
        ff("put", "run", "/run")
        assert oct((ff.root / "run").stat().st_mode)[-3:] == "600"
        ff("put", "-p", "run", "/run")
        assert oct((ff.root / "run").stat().st_mode)[-3:] == "777"
    finally:
        os.umask(old)


def test_sync_makes_one_directory_as_another(ff: Shell, tmp_path: Path) -> None:
    here = tmp_path / "here"
    fill(here)
    ff("sync", "here/a", "ff:///mirror")
    assert content_of(ff.root / "mirror") == content_of(here / "a")
    assert ff("sync", "-n", "here/a", "ff:///mirror") == ""
    assert ff("sync", "here/a", "ff:///mirror").startswith("0 files copied")
    (here / "a/one").unlink()
    (here / "a/two").write_bytes(b"new")
    (here / "a/link").unlink()
    (here / "a/link").mkdir()
    assert "--delete replaces it" in ff("sync", "-q", "here/a", "ff:///mirror", code=1)
    assert (ff.root / "mirror/one").exists()
    planned = ff.lines("sync", "-n", "--delete", "here/a", "ff:///mirror")
    assert planned == ["remove /mirror/link", "copy /mirror/two", "make /mirror/link/", "remove /mirror/one"] or (
        "remove /mirror/one" in planned
    )
    ff("sync", "--delete", "here/a", "ff:///mirror")
    assert content_of(ff.root / "mirror") == content_of(here / "a")
    (ff.root / "mirror/extra/x").mkdir(parents=True)
    ff("sync", "ff:///mirror", str(tmp_path / "third"))
    ff("sync", "--delete", "here/a", "ff:///mirror")
    assert "extra" not in os.listdir(ff.root / "mirror")
    assert (tmp_path / "third/extra/x").is_dir()


def test_sync_of_a_directory_into_itself_is_refused_the_first_time_too(ff: Shell) -> None:
    fill(ff.root)
    for _ in range(2):
        assert "is inside" in ff("sync", "ff:///a", "ff:///a/deep/copy", code=2)
    assert not (ff.root / "a/deep/copy").exists()


def test_bench_looks_for_the_directory_beside_before_it_measures(ff: Shell) -> None:
    assert "'--beside': Directory '/none' does not exist" in ff("bench", "--beside", "/none", code=2)
    assert os.listdir(ff.root) == []


def test_sync_leaves_what_another_copy_is_writing(ff: Shell, tmp_path: Path) -> None:
    fill(tmp_path / "here")
    ff("sync", "here/a", "ff:///mirror")
    partial = Partial("0" * 24, me(1), 5).name
    (ff.root / "mirror" / partial).touch()
    (tmp_path / "here/a" / partial).touch()
    (tmp_path / "here/a/one").unlink()
    assert "1 removed" in ff("sync", "--delete", "here/a", "ff:///mirror")
    assert (ff.root / "mirror" / partial).exists()


def test_sync_by_checksum_sees_what_times_do_not_say(ff: Shell, tmp_path: Path) -> None:
    here = tmp_path / "here"
    fill(here)
    ff("sync", "here/a", "ff:///mirror")
    status = (here / "a/two").stat()
    (here / "a/two").write_bytes(b"X" * 3000)
    os.utime(here / "a/two", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert ff("sync", "here/a", "ff:///mirror").startswith("0 files")
    assert ff("sync", "--checksum", "here/a", "ff:///mirror").startswith("1 file ")
    assert (ff.root / "mirror/two").read_bytes() == b"X" * 3000


def test_sync_removes_nothing_when_it_could_not_read_everything(
    ff: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "here")
    ff("sync", "here/a", "ff:///mirror")
    (ff.root / "mirror/extra").touch()
    real = beneath._LocalDirectory.scandir

    def failing(tree: beneath._LocalDirectory, path: str) -> object:
        if path == str(tmp_path / "here/a/deep"):
            raise PermissionError(13, "Permission denied", path)
        return real(tree, path)

    monkeypatch.setattr(beneath._LocalDirectory, "scandir", failing)
    assert "permission denied" in ff("sync", "--delete", "here/a", "ff:///mirror", code=1)
    assert (ff.root / "mirror/extra").exists()
    assert (ff.root / "mirror/deep/er/three").exists()


def test_bench_measures_both_and_leaves_nothing(ff: Shell, tmp_path: Path) -> None:
    here = tmp_path / "beside"
    here.mkdir()
    options = ("--size", "8MiB", "--files", "5", "--small", "1KiB", "--beside", str(here))
    text = ff("bench", *options)
    assert [line.split("  ")[0] for line in text.splitlines()][1:3] == ["write, one file", "read, one file"]
    found = msgspec.json.decode(ff("bench", "--json", *options))
    assert [one["what"] for one in found["cluster"]] == [one["what"] for one in found["here"]]
    assert all(one["per_s"] > 0 for one in found["cluster"] + found["here"])
    assert not list(ff.root.iterdir())
    assert not list(here.iterdir())
    assert "size" in ff("bench", "--size", "much", code=2)


def test_a_name_without_a_port_is_a_path_in_the_default_cluster(ff: Shell) -> None:
    fill(ff.root)
    assert ff.lines("ls", "ff://a/deep") == ff.lines("ls", "ff:///a/deep") == ff.lines("ls", "/a/deep")


def test_the_default_cluster_is_the_one_that_was_started_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What options name, then the environment, then `ff fs up`'s directory, then `ff up`'s."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FIREFLYER_FS", raising=False)
    assert target_of(None, ()) == f"ff://{tmp_path}/fs"
    for directory in ("platform/storage", "fs"):
        (tmp_path / directory).mkdir(parents=True)
        (tmp_path / directory / "cluster.json").touch()
        assert target_of(None, ()) == default_target() == f"ff://{tmp_path}/{directory}"
    monkeypatch.setenv("FIREFLYER_FS", "ff://there:7000")
    assert target_of(None, ()) == "ff://there:7000"
    assert target_of("other", ()) == f"ff://{tmp_path}/other"
    assert target_of(None, ("a:1",)) == "ff://a:1"
    monkeypatch.setenv("FIREFLYER_FS", "ff://there")  # the port was forgotten
    with pytest.raises(UsageError, match="set it to ff://HOST:PORT"):
        target_of(None, ())


def test_what_is_wrong_is_said_in_one_line(ff: Shell) -> None:
    assert "HOST:PORT" in ff("ls", "ff://data:x/y", code=2)
    assert "cannot be combined" in ff("ls", "--dir", "x", "--manager", "a:1", "/", code=2)
    assert "ask who you are; add --token-file FILE" in ff("ls", "ff://a:1/", code=2)
