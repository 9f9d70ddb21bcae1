"""`ff fs` on files of a cluster of this machine: copies are whole, what is interrupted leaves no half."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fs.clusters.file_commands import content_of
from tests.support.fs.clusters.local_cluster import LocalCluster
from tests.support.fs.mounts.mounting import needs_fuse
from tests.support.patience import allowed_s

import fireflyer.fs
from fireflyer.fs.client.local import access_of

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]
MIB = 1 << 20


@pytest.fixture(scope="module")
def cluster(module_path: Path) -> Iterator[LocalCluster]:
    found = LocalCluster(module_path)
    try:
        found.ff("up", "--detach", "--relaxed", "--targets-per-node", "2")
        yield found
    finally:
        found.close()


@pytest.fixture(autouse=True)
def nothing_is_there(cluster: LocalCluster) -> None:
    """Whichever test ran before on the cluster of this file, and however it ended."""
    with fireflyer.fs.connect(f"ff://{cluster.directory}") as files:
        for entry in list(files.scandir("/")):
            (files.rmtree if entry.is_dir() else files.unlink)(f"/{entry.name}")


def test_a_tree_goes_there_and_comes_back(cluster: LocalCluster, tmp_path: Path) -> None:
    here = tmp_path / "here"
    (here / "many").mkdir(parents=True)
    for number in range(100):
        name = "7 é\udcff" if number == 7 else str(number)
        (here / "many" / name).write_bytes(os.urandom(number * 100))
    (here / "large").write_bytes(os.urandom(9 * MIB + 17))
    (here / "link").symlink_to("many/1")
    (here / "empty").mkdir(mode=0o750)
    cluster.ff("put", "-r", "-p", str(here), "/tree")
    cluster.ff("cp", "-r", "-p", "/tree", "/second")
    cluster.ff("mv", "/second", "/third")
    cluster.ff("get", "-r", "-p", "/third", str(tmp_path / "back"))
    assert content_of(tmp_path / "back") == content_of(here)
    for path in here.rglob("*"):
        first, second = path.lstat(), (tmp_path / "back" / path.relative_to(here)).lstat()
        assert first.st_mode == second.st_mode
        assert path.is_symlink() or first.st_mtime_ns == second.st_mtime_ns
    assert cluster.ff("sync", str(here), "ff:///tree").startswith("0 files copied")
    assert cluster.ff("sync", "--checksum", str(here), "ff:///tree").startswith("0 files copied")
    (here / "many" / "7 é\udcff").write_bytes(b"changed")
    (here / "large").unlink()
    assert cluster.ff("sync", "--delete", str(here), "ff:///tree").startswith(
        "1 file copied or changed (7 B), 1 removed"
    )
    size = sum(path.lstat().st_size for path in here.rglob("*") if not path.is_dir() or path.is_symlink())
    assert cluster.ff("du", "-sb", "/tree") == f"{size}\t/tree\n"
    found = cluster.ff("find", "/tree", "-type", "f", "-size", "+18")
    assert found.splitlines() == [f"/tree/many/{number}" for number in range(93, 100)]
    cluster.ff("rm", "-r", "/tree", "/third")
    assert cluster.ff("ls", "/") == ""
    assert cluster.ff("gc", "--wait", "120") == "No removed files are waiting: all of their space is free.\n"
    assert cluster.ff("cat", "/tree/large", code=1) == "error: /tree/large: no such file or directory\n"


def test_touch_makes_files_and_sets_times(cluster: LocalCluster) -> None:
    with fireflyer.fs.connect(f"ff://{cluster.directory}") as files:
        with files.open("/old", "wb") as file:
            file.write(b"kept")
        files.utime("/old", ns=(0, 0))
        assert cluster.ff("touch", "/old", "/new") == ""
        status = files.stat("/old")
        assert min(status.st_atime_ns, status.st_mtime_ns) > 0
        assert (files.stat("/new").st_size, cluster.ff("cat", "/old")) == (0, "kept")
        assert cluster.ff("touch", "-c", "/none") == ""
        assert cluster.ff("touch", "/none/new", code=1) == "error: /none/new: no such file or directory\n"
    cluster.ff("rm", "/old", "/new")
    cluster.ff("gc", "--wait", "120")


def test_status_and_gc_say_what_is_so_when_they_are_asked(cluster: LocalCluster) -> None:
    def said() -> tuple[int, int, int, int, int]:
        found = cluster.status()
        files = found["files"]
        names = "inodes", "writing", "unlinked", "unlinked_bytes"
        counts = [files[name] for name in names]
        return found["summary"]["sessions"], counts[0], counts[1], counts[2], counts[3]

    # What tests before this one removed is collected, and the one session is that of the service itself.
    cluster.wait(lambda status: (status["summary"]["sessions"], status["files"]["unlinked"]) == (1, 0))
    sessions, inodes, writing, unlinked, size = said()
    assert (writing, unlinked, size) == (0, 0, 0)
    with fireflyer.fs.connect(f"ff://{cluster.directory}") as files:
        for name in ("a", "b"):
            with files.open(f"/{name}", "wb") as file:
                file.write(bytes(MIB))
        reading = files.open_file("/a", "rb")
        appending = files.open_file("/b", "ab")
        cluster.wait(lambda status: (status["files"]["inodes"], status["files"]["writing"]) == (inodes + 2, 1))
        assert said() == (sessions + 1, inodes + 2, 1, 0, 0)
        files.unlink("/a")
        files.unlink("/b")
        assert said()[2:] == (1, 2, 2 * MIB)
        assert cluster.ff("gc") == "2 files (2.0 MiB) removed and not collected yet.\n"
        cluster.ff("gc", "--wait", "0", code=1)
        assert "1 open for writing" in cluster.ff("status")
        assert "; 2 removed and not collected yet (2.0 MiB)." in cluster.ff("status")
        reading.close()
        appending.close()
        assert cluster.ff("gc", "--wait", "120") == "No removed files are waiting: all of their space is free.\n"
        cluster.wait(lambda status: status["files"]["inodes"] == inodes)
    cluster.wait(lambda status: status["summary"]["sessions"] == sessions)
    assert said() == (sessions, inodes, 0, 0, 0)


def test_an_address_names_its_cluster(cluster: LocalCluster) -> None:
    place = f"ff://{str(cluster.directory).replace('/', '%2F')}"
    command = [sys.executable, "-P", "-m", "fireflyer", "fs"]
    subprocess.run([*command, "mkdir", f"{place}/named"], check=True, timeout=allowed_s(60))
    done = subprocess.run(
        [*command, "ls", f"{place}/"], check=True, timeout=allowed_s(60), capture_output=True, text=True
    )
    assert done.stdout == "named\n"
    cluster.ff("rm", "-d", "/named")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_copy_that_is_interrupted_goes_on_and_is_never_seen_in_part(
    cluster: LocalCluster, tmp_path: Path, number: signal.Signals
) -> None:
    data = os.urandom(40 * MIB)
    source = tmp_path / "large"
    source.write_bytes(data)
    with fireflyer.fs.connect(f"ff://{cluster.directory}") as files:
        with files.open("/large", "wb") as file:
            file.write(b"old")
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _STOPS, str(source), str(cluster.directory)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"half\n"
        finally:
            process.send_signal(number)
            _, said = process.communicate(timeout=allowed_s(60))
        assert process.returncode == (130 if number == signal.SIGINT else -number), said
        with files.open("/large") as file:
            assert file.read() == b"old"
        (partial,) = [entry for entry in files.scandir("/") if entry.name.startswith(".ff-part-")]
        assert int(partial.name.rpartition("-")[2]) >= 16 * MIB
    done = subprocess.run(
        [sys.executable, "-P", "-c", _STOPS, str(source), str(cluster.directory), "on"],
        timeout=allowed_s(120),
        check=True,
        capture_output=True,
    )
    assert int(done.stdout) >= 16 * MIB
    with fireflyer.fs.connect(f"ff://{cluster.directory}") as files:
        with files.open("/large") as file:
            assert file.read() == data
        assert [entry.name for entry in files.scandir("/")] == ["large"]
        files.unlink("/large")


_STOPS = """
import sys
import msgspec
from fireflyer.cli import main
from fireflyer.fs.tools import copying, running
source, directory, *on = sys.argv[1:]
copying.BLOCK_BYTES = 1 << 20
real = copying.copy_file
copied = 0
def copy_file(*args, options, advanced, **kwargs):
    options = msgspec.structs.replace(options, resume_bytes=1 << 20, sync_bytes=8 << 20)
    def counted(size):
        global copied
        if on and not copied:
            print(size if size > 1 << 20 else 0, flush=True)
        copied += size
        if not on and copied == 20 << 20:
            print("half", flush=True)
            kwargs["stopped"].wait(60)
        advanced(size)
    real(*args, options=options, advanced=counted, **kwargs)
running.copy_file = copy_file
sys.exit(main(["fs", "put", "-q", source, "/large", "--dir", directory]))
"""


def test_several_threads_use_one_file_system(cluster: LocalCluster) -> None:
    """As the tools do: eight at a time."""
    with fireflyer.fs.connect(f"ff://{cluster.directory}") as files:
        files.mkdir("/threads")
        errors: list[BaseException] = []

        def work(own: int) -> None:
            try:
                for step in range(12):
                    path = f"/threads/{own}-{step}"
                    with files.open(path, "wb") as file:
                        file.write(path.encode() * 1000)
                    with files.open(path) as file:
                        assert file.read() == path.encode() * 1000
                    files.rename(path, f"{path}.done")
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(own,)) for own in range(8)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert not errors
        assert len(files.listdir("/threads")) == 96
        files.rmtree("/threads")


def test_standard_output_that_takes_no_more_is_no_fault_of_the_file(cluster: LocalCluster) -> None:
    command = [sys.executable, "-P", "-m", "fireflyer", "fs"]
    where = ["--dir", str(cluster.directory)]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    subprocess.run([*command, "put", "-", "/full", *where], input=bytes(MIB), check=True)
    for verb in ("cat", "ls", "stat"):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                [*command, verb, "/full", *where], stdout=full, stderr=subprocess.PIPE, env=buffered, check=False
            )
        assert done.returncode == 1
        assert done.stderr == b"error: cannot write to standard output: no space left on device\n"


@needs_fuse
def test_a_detached_mount_without_a_log_says_why_it_failed(cluster: LocalCluster, tmp_path: Path) -> None:
    managers, _ = access_of(str(cluster.directory))
    token, place = tmp_path / "token", tmp_path / "mnt"
    token.write_text("no token")
    token.chmod(0o600)
    place.mkdir()
    command = [sys.executable, "-P", "-m", "fireflyer", "fs", "mount", "-d", "--manager", managers[0]]
    command += ["--token-file", str(token), str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "this is not a user token" in done.stderr
