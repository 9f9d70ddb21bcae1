"""Files of a cluster, mounted: programs that know nothing of us, several mounts at once, what is left when one ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.support.fs.clusters.local_cluster import LocalCluster
from tests.support.fs.mounts.mounting import Mount, mounted, needs_fuse
from tests.support.patience import allowed_s

from fireflyer.fs.mount.serving import VALID_S

pytestmark = [needs_fuse, pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(300)]
FF = [sys.executable, "-P", "-m", "fireflyer", "fs"]
MakeMount = Callable[..., Mount]


@pytest.fixture(scope="module")
def cluster(shared_cluster: LocalCluster) -> LocalCluster:
    return shared_cluster


def _mounts(stack: ExitStack, cluster: LocalCluster, directory: Path) -> MakeMount:
    def make(name: str, *options: str) -> Mount:
        place = directory / name
        place.mkdir()
        command = [*FF, "mount", str(place), "--dir", str(cluster.directory), *options]
        return stack.enter_context(mounted(command, str(place)))

    return make


@pytest.fixture
def make_mount(cluster: LocalCluster, tmp_path: Path) -> Iterator[MakeMount]:
    with ExitStack() as stack:
        yield _mounts(stack, cluster, tmp_path)


@pytest.fixture(scope="module")
def pair(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Mount, Mount]]:
    """Two mounts of the same files, for all tests that leave them as they are."""
    with ExitStack() as stack:
        make = _mounts(stack, cluster, tmp_path_factory.mktemp("pair"))
        yield make("one", "--allow-other"), make("two")


@pytest.fixture
def top(tmp_path: Path) -> str:
    """A name of its own for each test: they share the cluster."""
    return tmp_path.name


@pytest.fixture
def mount(pair: tuple[Mount, Mount], top: str) -> Mount:
    """A directory of its own in one of them."""
    one = pair[0]
    os.mkdir(os.path.join(one.path, top))
    return Mount(one.process, os.path.join(one.place, top))


def test_git_works_in_it(mount: Mount) -> None:
    who = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org"]
    mount.run("git", "init", "-q", "first")
    for number in range(8):
        Path(mount.path, "first", f"file-{number}").write_text(f"{number}\n" * 1000)
    mount.run("git", "-C", "first", "add", ".")
    mount.run("git", "-C", "first", *who, "commit", "-q", "-m", "one")
    mount.run("git", "clone", "-q", "first", "second")
    Path(mount.path, "second", "file-3").write_text("other\n")
    assert mount.run("git", "-C", "second", "status", "--short") == " M file-3\n"
    mount.run("git", "-C", "second", *who, "commit", "-q", "-a", "-m", "two")
    assert len(mount.run("git", "-C", "second", "log", "--oneline").splitlines()) == 2
    mount.run("git", "-C", "second", "fsck", "--strict")


@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="there is no sqlite3")
@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_sqlite_works_in_it(mount: Mount, journal: str) -> None:
    sql = f"pragma journal_mode={journal}; create table t(a, b);"
    fill = "insert into t select value, hex(randomblob(200)) from generate_series(1, 3000);"
    mount.run("sqlite3", "base", sql)
    mount.run("sqlite3", "base", fill)
    mount.run("sqlite3", "base", "delete from t where a % 3 = 0; vacuum;")
    found = mount.run("sqlite3", "base", "select count(*), sum(a) from t; pragma integrity_check;")
    assert found == f"2000|{sum(a for a in range(3001) if a % 3)}\nok\n"


def test_archives_are_unpacked_and_programs_built_in_it(mount: Mount, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "deep" / "er" / "random").write_bytes(random.Random(1).randbytes(300_000))
    (source / "link").symlink_to("deep/er/random")
    (source / "main.c").write_text('#include <stdio.h>\nint main(void) { puts("built"); return 0; }\n')
    os.utime(source / "main.c", ns=(1_000_000_001, 2_000_000_002))
    archive = subprocess.run(["tar", "-C", str(source), "-cf", "-", "."], capture_output=True, check=True).stdout
    unpacked = Path(mount.path, "unpacked")
    unpacked.mkdir()
    (unpacked / "archive").write_bytes(archive)
    mount.run("tar", "-C", "unpacked", "-xpf", "unpacked/archive")
    mount.run("diff", "-r", "--no-dereference", "--exclude=archive", str(source), "unpacked")
    assert os.stat(unpacked / "main.c").st_mtime_ns // 10**9 == 2
    if shutil.which("cc") is not None:
        mount.run("cc", "-o", "unpacked/program", "unpacked/main.c")
        assert mount.run("./unpacked/program") == "built\n"


def test_listing_goes_on_without_shrinking_files_that_were_written_since_it_began(mount: Mount) -> None:
    for number in range(1000):
        Path(mount.path, f"file-{number:04}").touch()
    with os.scandir(mount.path) as entries:
        next(entries)
        fd = os.open(os.path.join(mount.path, "file-0800"), os.O_RDWR)
        data = random.Random(3).randbytes(1 << 20)
        os.pwrite(fd, data, 0)
        assert len(list(entries)) == 999
    assert os.fstat(fd).st_size == len(data)
    with mmap.mmap(fd, len(data)) as mapped:
        assert mapped[:] == data
    os.close(fd)


def test_counting_under_a_lock_loses_nothing_though_the_file_stays_open_on_two_mounts(
    pair: tuple[Mount, Mount], top: str
) -> None:
    one, two = pair
    os.mkdir(os.path.join(one.path, top))
    Path(one.path, top, "counter").write_bytes(b"0" * 8)
    fds = [os.open(os.path.join(mount.path, top, "counter"), os.O_RDWR) for mount in (one, two)]
    for turn in range(30):
        fd = fds[turn % 2]
        fcntl.flock(fd, fcntl.LOCK_EX) if turn % 3 else fcntl.lockf(fd, fcntl.LOCK_EX)
        found = int(os.pread(fd, 8, 0))
        os.pwrite(fd, b"%08d" % (found + 1), 0)
        fcntl.flock(fd, fcntl.LOCK_UN) if turn % 3 else fcntl.lockf(fd, fcntl.LOCK_UN)
    assert int(os.pread(fds[1], 8, 0)) == 30
    for fd in fds:
        os.close(fd)


def test_who_opens_after_a_close_sees_all_of_it_through_another_mount(pair: tuple[Mount, Mount], top: str) -> None:
    one, two = pair
    os.mkdir(os.path.join(one.path, top))
    paths = [os.path.join(mount.path, top, "shared") for mount in (one, two)]
    rng = random.Random(2)
    kept = bytearray()
    for turn in range(20):
        writer, reader = paths if turn % 2 else reversed(paths)
        offset, data = rng.randrange(len(kept) + 1), rng.randbytes(rng.choice([1, 5000, 200_000]))
        fd = os.open(writer, os.O_WRONLY | os.O_CREAT, 0o644)
        if rng.random() < 0.2:
            os.ftruncate(fd, offset)
            del kept[offset:]
        os.pwrite(fd, data, offset)
        os.close(fd)
        kept[offset : offset + len(data)] = data
        fd = os.open(reader, os.O_RDONLY)
        assert os.fstat(fd).st_size == len(kept)
        assert os.pread(fd, len(kept) + 1, 0) == kept
        os.close(fd)


def test_a_second_later_each_change_of_a_name_is_seen_through_the_other_mount(
    pair: tuple[Mount, Mount], top: str
) -> None:
    here, there = (Path(mount.path, top) for mount in pair)
    here.mkdir()
    names = ["mode", "replaced", "renamed", "removed", "longer", "times", "linked", "exchanged"]
    for name in names:
        (here / name).write_bytes(name.encode())
    (here / "directory").mkdir()
    kept = {name: (there / name).stat() for name in (*names, "directory")}  # and so in the kernel's memory
    assert sorted(os.listdir(there)) == sorted(kept)
    (here / "mode").chmod(0o600)
    (here / "new").write_bytes(b"replaces it")
    (here / "new").rename(here / "replaced")
    (here / "renamed").rename(here / "directory" / "renamed")
    (here / "removed").unlink()
    with (here / "longer").open("ab") as file:
        file.write(bytes(1000))
    os.utime(here / "times", ns=(1, 2))
    os.link(here / "linked", here / "second")
    (here / "exchanged").unlink()
    (here / "exchanged").mkdir()
    time.sleep(VALID_S + 0.1)
    assert (there / "mode").stat().st_mode & 0o777 == 0o600
    assert (there / "replaced").read_bytes() == b"replaces it"
    assert (there / "replaced").stat().st_ino != kept["replaced"].st_ino
    assert (there / "directory" / "renamed").stat().st_ino == kept["renamed"].st_ino
    assert not (there / "renamed").exists()
    assert not (there / "removed").exists()
    assert (there / "longer").stat().st_size == 1006
    assert (there / "times").stat().st_mtime_ns == 2
    assert (there / "linked").stat().st_nlink == 2
    assert (there / "exchanged").is_dir()
    gone = {"renamed", "removed"}
    assert sorted(os.listdir(there)) == sorted((set(kept) | {"second"}) - gone)


def test_appends_through_two_mounts_are_all_there_and_whole(pair: tuple[Mount, Mount], top: str) -> None:
    one, two = pair
    path = os.path.join(one.path, top)
    Path(path).touch()
    writers = [
        subprocess.Popen(mount.command(["sh", "-c", f"for n in $(seq 15); do echo {name}-$n-end >> {top}; done"]))
        for mount, name in ((one, "a"), (two, "b"), (one, "c"))
    ]
    assert [writer.wait(allowed_s(120)) for writer in writers] == [0, 0, 0]
    lines = Path(path).read_text().splitlines()
    assert sorted(lines) == sorted(f"{name}-{n}-end" for name in "abc" for n in range(1, 16))
    for name in "abc":
        assert [line for line in lines if line[0] == name] == [f"{name}-{n}-end" for n in range(1, 16)]


def test_locks_hold_between_mounts(pair: tuple[Mount, Mount], top: str) -> None:
    one, two = pair
    Path(one.path, top).write_bytes(b"0123456789")
    mine, theirs = (os.open(os.path.join(mount.path, top), os.O_RDWR) for mount in (one, two))
    fcntl.flock(mine, fcntl.LOCK_SH)
    fcntl.flock(theirs, fcntl.LOCK_SH)
    with pytest.raises(BlockingIOError):
        fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(mine, fcntl.LOCK_UN)
    fcntl.flock(theirs, fcntl.LOCK_EX)
    # Ranges do not see whole locks. This process is one owner at both mounts, but another one at each.
    fcntl.lockf(mine, fcntl.LOCK_EX, 4, 2)
    with pytest.raises(BlockingIOError):
        fcntl.lockf(theirs, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, 5)
    fcntl.lockf(theirs, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, 6)
    os.close(mine)  # and its locks
    fcntl.lockf(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 0)
    os.close(theirs)


def test_what_is_unlinked_is_there_until_it_is_closed(mount: Mount) -> None:
    path = os.path.join(mount.path, "gone")
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.write(fd, b"before")
    os.unlink(path)
    os.pwrite(fd, b" and after", 6)
    assert os.pread(fd, 100, 0) == b"before and after"
    assert os.fstat(fd).st_nlink == 0
    os.close(fd)
    assert os.listdir(mount.path) == []


def test_each_user_has_his_own_rights(mount: Mount) -> None:
    os.chmod(mount.path, 0o1777)
    as_ada = ["setpriv", "--reuid=1234", "--regid=1234", "--groups=77"]
    as_bob = ["setpriv", "--reuid=4321", "--regid=4321", "--clear-groups"]
    mount.run(*as_ada, "sh", "-c", "umask 077; echo secret > mine; echo all > ours; chmod 640 ours; chgrp 77 ours")
    found = os.stat(os.path.join(mount.path, "mine"))
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (1234, 1234, 0o600)
    for command in ("cat mine", "rm -f mine", "cat ours", "mv ours x"):
        with pytest.raises(AssertionError, match=r"denied|permitted"):
            mount.run(*as_bob, "sh", "-c", command)
    assert mount.run("setpriv", "--reuid=555", "--regid=555", "--groups=77", "cat", "ours") == "all\n"
    mount.run(*as_ada, "sh", "-c", "echo > ours; chmod 4777 ours; chmod 4755 mine")
    with pytest.raises(AssertionError, match="not permitted"):
        mount.run(*as_bob, "chmod", "755", "mine")
    mount.run(*as_bob, "sh", "-c", "echo changed > ours")
    modes = [os.stat(os.path.join(mount.path, name)).st_mode & 0o7777 for name in ("mine", "ours")]
    assert modes == [0o4755, 0o777]  # who writes to a file takes its privilege from it


def test_a_write_through_one_mount_takes_a_privilege_that_the_other_has_looked_at_at_once(
    pair: tuple[Mount, Mount], top: str
) -> None:
    """The kernel would keep the mode for VALID_S; a program is set-user-id no longer than nobody has written to it."""
    here, there = (Path(mount.path, top) for mount in pair)
    here.write_bytes(b"program")
    here.chmod(0o4777)
    as_bob = ["setpriv", "--reuid=4321", "--regid=4321", "--clear-groups"]
    writer = subprocess.Popen(
        pair[0].command([*as_bob, "sh", "-c", f"exec 1<>{top}; echo open >&2; exec cat"]),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert writer.stdin is not None
    assert writer.stderr is not None
    with writer, writer.stdin, writer.stderr:
        assert writer.stderr.readline() == b"open\n"
        assert there.stat().st_mode & 0o7777 == 0o4777
        writer.stdin.write(b"changed")
        writer.stdin.close()
        assert writer.stderr.read() == b""  # it has ended
        assert there.stat().st_mode & 0o7777 == 0o777
    assert there.read_bytes() == b"changed"


def test_values_times_special_files_and_space(mount: Mount) -> None:
    path = os.path.join(mount.path, "file")
    Path(path).write_bytes(b"x" * 10)
    os.setxattr(path, "user.colour", b"blue")
    assert os.listxattr(path) == ["user.colour"]
    assert os.getxattr(path, "user.colour") == b"blue"
    os.utime(path, ns=(-1_000_000_001, 7))
    assert (os.stat(path).st_atime_ns, os.stat(path).st_mtime_ns) == (-1_000_000_001, 7)
    os.mkfifo(os.path.join(mount.path, "fifo"))
    mount.run("sh", "-c", "echo through > fifo & cat fifo")
    os.posix_fallocate(fd := os.open(path, os.O_RDWR), 0, 5000)
    assert os.fstat(fd).st_size == 5000
    os.close(fd)
    assert os.statvfs(path).f_namemax == 255
    with pytest.raises(OSError, match="too long") as caught:
        os.stat(os.path.join(mount.path, "n" * 256))
    assert caught.value.errno == errno.ENAMETOOLONG


def test_who_is_over_the_quota_is_told_so(cluster: LocalCluster, mount: Mount, top: str) -> None:
    cluster.ff("quota", "--bytes", "100KiB", "--inodes", "4", f"/{top}")
    fd = os.open(os.path.join(mount.path, "file"), os.O_WRONLY | os.O_CREAT)
    os.write(fd, bytes(60_000))
    os.fsync(fd)
    os.write(fd, bytes(60_000))
    with pytest.raises(OSError, match="quota") as caught:
        os.fsync(fd)
    assert caught.value.errno == errno.EDQUOT
    with contextlib.suppress(OSError):
        os.close(fd)
    os.mkdir(os.path.join(mount.path, "second"))
    os.symlink("x", os.path.join(mount.path, "third"))
    for make in (os.mkdir, os.mkfifo, lambda path: os.symlink("x", path)):
        with pytest.raises(OSError, match="quota") as caught:
            make(os.path.join(mount.path, "fourth"))
        assert caught.value.errno == errno.EDQUOT
    os.unlink(os.path.join(mount.path, "file"))
    assert sorted(os.listdir(mount.path)) == ["second", "third"]


def test_after_its_process_was_killed_what_was_closed_is_there(make_mount: MakeMount, top: str) -> None:
    one, two = (make_mount(name) for name in ("one", "two"))
    Path(one.path, top).write_bytes(b"closed")
    fd = os.open(os.path.join(one.path, top), os.O_RDONLY)
    one.process.kill()
    one.process.wait(allowed_s(60))
    with pytest.raises(OSError, match="not connected") as caught:
        os.pread(fd, 6, 0)
    assert caught.value.errno == errno.ENOTCONN
    with pytest.raises(OSError, match="not connected"):
        os.close(fd)
    assert Path(two.path, top).read_bytes() == b"closed"


@pytest.mark.parametrize(
    "expires", [pytest.param(True, marks=pytest.mark.campaign(expected_s=10), id="when its session expires"), False]
)
def test_locks_of_a_mount_that_died_are_had_by_who_waits_for_them(
    cluster: LocalCluster, make_mount: MakeMount, top: str, expires: bool
) -> None:
    one, two = (make_mount(name) for name in ("one", "two"))
    Path(one.path, top).write_bytes(b"locked")
    first, second = (os.open(os.path.join(mount.path, top), os.O_RDWR) for mount in (one, two))
    fcntl.flock(first, fcntl.LOCK_EX)
    fcntl.lockf(first, fcntl.LOCK_EX, 3, 1)
    for lock in (fcntl.flock, fcntl.lockf):
        with pytest.raises(BlockingIOError):
            lock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    one.process.kill()
    one.process.wait(allowed_s(60))
    if not expires:  # after a minute, or when somebody says that it is dead
        sessions = json.loads(cluster.ff("admin", "sessions", "--json"))
        name = f"mount of {one.place}"[:128]
        cluster.ff("admin", "end-session", str(min(one["client"] for one in sessions if one["name"] == name)))
    fcntl.flock(second, fcntl.LOCK_EX)
    fcntl.lockf(second, fcntl.LOCK_EX)
    os.close(second)
    with pytest.raises(OSError, match="not connected"):
        os.close(first)


def test_who_is_killed_while_the_cluster_does_not_answer_waits_no_more(
    cluster: LocalCluster, make_mount: MakeMount, top: str
) -> None:
    if not os.path.exists("/proc/self/stack"):
        pytest.skip("the kernel does not say what a process waits for")
    mount = make_mount("one")
    Path(mount.path, top).touch()
    manager = cluster.process("manager-1")
    with contextlib.ExitStack() as stack:
        command = mount.command(["stat", f"{top}-that-is-not-there"])
        os.kill(manager, signal.SIGSTOP)
        waiting = stack.enter_context(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        stack.callback(os.kill, manager, signal.SIGCONT)
        while not _waits_in_the_kernel(waiting.pid):
            assert waiting.poll() is None
        waiting.terminate()
        assert waiting.wait(allowed_s(60)) == -signal.SIGTERM
    assert os.listdir(mount.path).count(top) == 1


def _waits_in_the_kernel(process: int) -> bool:
    """For what a mount answers."""
    return "fuse" in Path(f"/proc/{process}/stack").read_text()


_OPERATIONS = 250


def test_random_operations_of_several_descriptors_are_those_of_a_local_file(mount: Mount, tmp_path: Path) -> None:
    rng = random.Random(11)
    paths = [os.path.join(mount.path, "twin"), str(tmp_path / "twin")]
    opened: list[list[int]] = []
    for step in range(_OPERATIONS):
        if len(opened) < 3:
            opened.append([os.open(path, os.O_RDWR | os.O_CREAT, 0o644) for path in paths])
        twins = rng.choice(opened)
        offset, size = rng.randrange(3 << 20), rng.choice([1, 4095, 4096, 66_000, 1 << 20])
        turn = rng.randrange(12)
        results: list[object] = [None, None]
        if turn < 4:
            data = rng.randbytes(size)
            results = [os.pwrite(fd, data, offset) for fd in twins]
        elif turn < 8:
            results = [os.pread(fd, size, offset) for fd in twins]
        elif turn == 8:
            for fd in twins:
                os.ftruncate(fd, offset)
        elif turn == 9:
            results = [os.fstat(fd).st_size for fd in twins]
        elif turn == 10:
            results = [_change_mapped(fd, step) for fd in twins]
        else:
            for fd in twins:
                os.close(fd)
            opened.remove(twins)
        assert results[0] == results[1], (step, turn, offset, size)
    for fd in (fd for twins in opened for fd in twins):
        os.close(fd)
    assert Path(paths[0]).read_bytes() == Path(paths[1]).read_bytes()


def _change_mapped(fd: int, step: int) -> bytes:
    """Through shared memory, without telling when it is to be written."""
    size = os.fstat(fd).st_size
    if not size:
        return b""
    with mmap.mmap(fd, size) as memory:
        place = step * 7919 % size
        before = memory[place : place + 10]
        memory[place : place + len(before)] = bytes([step % 256]) * len(before)
    return before


def test_what_is_written_past_the_kernels_pages_is_seen_through_a_mapping(mount: Mount) -> None:
    path = f"{mount.path}/mapped"
    writer = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(writer, b"a" * 8192)
    reader = os.open(path, os.O_RDONLY)
    with mmap.mmap(reader, 8192, prot=mmap.PROT_READ) as mapped:
        for byte in (b"a", b"b", b"c"):
            os.pwrite(writer, byte * 8192, 0)
            assert mapped[:] == os.pread(reader, 8192, 0) == byte * 8192
    os.close(reader)
    os.close(writer)


def test_asked_to_end_it_sends_on_what_was_written(make_mount: MakeMount, top: str) -> None:
    one, two = (make_mount(name) for name in ("one", "two"))
    fd = os.open(os.path.join(one.path, top), os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"not closed")
    one.process.send_signal(signal.SIGTERM)
    one.end()
    assert one.process.returncode == 0
    with pytest.raises(OSError, match="not connected"):
        os.close(fd)
    assert Path(two.path, top).read_bytes() == b"not closed"


def test_detached_read_only_and_unmounted_by_command(cluster: LocalCluster, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    script = """
        trap 'umount -l "$1" 2>/dev/null' EXIT
        $FF mount "$1" --dir "$2" --read-only -d || exit 1
        touch "$1/new" 2>&1
        cd "$1" && $FF umount "$1" 2>&1
        cd / && $FF umount "$1" && $FF umount "$1" 2>&1
        touch "$1/in-the-way" && $FF mount "$1" --dir "$2" 2>&1
    """
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]
    done = subprocess.run(
        [*command, str(place), str(cluster.directory)],
        capture_output=True, text=True, timeout=allowed_s(120), check=False,
        env={**os.environ, "FF": " ".join(FF), "LC_ALL": "C"},
    )  # fmt: skip
    mounted_, read_only, busy, unmounted, nothing, not_empty = done.stdout.splitlines()
    assert mounted_.startswith("Mounted on")
    assert "Read-only file system" in read_only
    assert busy.startswith("error: ")
    assert "is in use" in busy
    assert unmounted.endswith("is unmounted.")
    assert "is not a mount of" in nothing
    assert "is not empty" in not_empty
