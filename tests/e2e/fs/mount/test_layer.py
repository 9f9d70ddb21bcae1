"""The mount's own layer over a local directory: what the kernel asks is answered as the directory itself would.

Native threads, the events that Python takes, its answers, and how a mount ends; without a cluster.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fs.mounts.mounting import Mount, local_mount, needs_fuse
from tests.support.jobs.launching import wait_until
from tests.support.patience import allowed_s

pytestmark = [needs_fuse, pytest.mark.slow, pytest.mark.processes]


@pytest.fixture(params=["natively", "by events"])
def mount(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mount]:
    natively = request.param == "natively"
    with local_mount(str(tmp_path / "source"), str(tmp_path / "place"), natively=natively) as mount:
        yield mount


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Mount]:
    with local_mount(str(tmp_path / "source"), str(tmp_path / "place"), natively=False) as mount:
        yield mount


def test_bytes_written_at_any_place_are_read_as_from_a_local_file(mount: Mount, tmp_path: Path) -> None:
    rng = random.Random(5)
    paths = [os.path.join(mount.path, "twin"), str(tmp_path / "twin")]
    twins = [os.open(path, os.O_RDWR | os.O_CREAT, 0o644) for path in paths]
    for _ in range(150):
        offset, size = rng.randrange(5 << 20), rng.choice([1, 4096, 70_000, 1 << 20, (1 << 20) + 5, 3_000_000])
        turn = rng.random()
        if turn < 0.45:
            data = rng.randbytes(size)
            assert [os.pwrite(fd, data, offset) for fd in twins] == [size, size]
        elif turn < 0.55:
            for fd in twins:
                os.ftruncate(fd, offset)
        else:
            mine, theirs = (os.pread(fd, size, offset) for fd in twins)
            assert mine == theirs
    for fd in twins:
        os.close(fd)
    assert Path(paths[0]).read_bytes() == Path(paths[1]).read_bytes()
    assert (tmp_path / "source" / "twin").read_bytes() == Path(paths[1]).read_bytes()


def test_names_are_made_found_moved_and_removed(plain: Mount) -> None:
    top = Path(plain.path)
    (top / "a" / "b").mkdir(parents=True)
    (top / "a" / "file").write_text("text")
    os.link(top / "a" / "file", top / "second")
    os.symlink("a/file", top / "link")
    assert (top / "link").read_text() == "text"
    assert os.readlink(top / "link") == "a/file"
    assert os.stat(top / "second").st_nlink == 2
    os.rename(top / "a", top / "c")
    assert sorted(os.listdir(top)) == ["c", "link", "second"]
    with pytest.raises(OSError, match="Directory not empty") as caught:
        os.rmdir(top / "c")
    assert caught.value.errno == errno.ENOTEMPTY
    with pytest.raises(FileNotFoundError):
        os.stat(top / "a" / "file")
    os.unlink(top / "c" / "file")
    os.rmdir(top / "c" / "b")
    os.rmdir(top / "c")
    os.mkfifo(top / "fifo")
    assert stat.S_ISFIFO(os.stat(top / "fifo").st_mode)
    assert sorted(os.listdir(top)) == ["fifo", "link", "second"]


def test_a_large_directory_is_listed_whole_and_again(plain: Mount, tmp_path: Path) -> None:
    names = {f"name-{number:05}" for number in range(3000)}
    for name in names:
        (tmp_path / "source" / name).touch()
    fd = os.open(plain.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        listed = os.listdir(fd)
        assert len(listed) == 3000
        assert set(listed) == names
        assert sorted(os.listdir(fd)) == sorted(names)  # the same open directory, from its beginning
    finally:
        os.close(fd)
    found = {entry.name: entry.stat(follow_symlinks=False).st_size for entry in os.scandir(plain.path)}
    assert set(found) == names


def test_names_removed_while_a_directory_is_listed_hide_no_others(plain: Mount, tmp_path: Path) -> None:
    for number in range(3000):
        (tmp_path / "source" / f"name-{number:05}").touch()
    for entry in os.scandir(plain.path):
        if entry.name >= "name-01200":
            os.unlink(entry.path)
    assert sorted(os.listdir(plain.path)) == [f"name-{number:05}" for number in range(1200)]


def test_attributes_times_values_and_space(plain: Mount) -> None:
    path = os.path.join(plain.path, "file")
    Path(path).write_bytes(b"12345")
    os.chmod(path, 0o640)
    os.utime(path, ns=(-1_500_000_000, 3_000_000_001))
    os.truncate(path, 3)
    os.utime(path, ns=(-1_500_000_000, 3_000_000_001))
    found = os.stat(path)
    assert (stat.S_IMODE(found.st_mode), found.st_size) == (0o640, 3)
    assert (found.st_atime_ns, found.st_mtime_ns) == (-1_500_000_000, 3_000_000_001)
    os.setxattr(path, "user.colour", b"blue")
    assert os.listxattr(path) == ["user.colour"]
    assert os.getxattr(path, "user.colour") == b"blue"
    os.removexattr(path, "user.colour")
    with pytest.raises(OSError, match="No data") as caught:
        os.getxattr(path, "user.colour")
    assert caught.value.errno == errno.ENODATA
    assert os.statvfs(path).f_blocks > 0


def test_which_process_serves_it_is_told_not_stored(plain: Mount) -> None:
    assert int(os.getxattr(plain.path, "user.fireflyer.process").split()[0]) == plain.process.pid
    with pytest.raises(PermissionError):
        os.setxattr(plain.path, "user.fireflyer.process", b"1 1")


def test_files_belong_to_who_makes_them(plain: Mount) -> None:
    os.chmod(plain.path, 0o777)
    plain.run("setpriv", "--reuid=1234", "--regid=2345", "--clear-groups", "touch", "mine")
    found = os.stat(os.path.join(plain.path, "mine"))
    assert (found.st_uid, found.st_gid) == (1234, 2345)
    os.chmod(os.path.join(plain.path, "mine"), 0o600)
    with pytest.raises(AssertionError, match="denied"):
        plain.run("setpriv", "--reuid=4321", "--regid=2345", "--clear-groups", "cat", "mine")


_WAITS = """
import fcntl, os, signal, sys
fd = os.open(sys.argv[1], os.O_RDWR)
def stop(*_):
    raise InterruptedError
signal.signal(signal.SIGUSR1, stop)
try:
    print("waits", flush=True)
    fcntl.flock(fd, fcntl.LOCK_EX)
    print("has it", flush=True)
except InterruptedError:
    print("interrupted", flush=True)
except OSError as error:
    print(error, flush=True)
"""


def _waiting(path: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", _WAITS, path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    wait_until(lambda: _in_a_call(process.pid), allowed_s(60), "it does not wait")
    return process


def _in_a_call(pid: int) -> bool:
    """Whether it sleeps in a system call."""
    return Path(f"/proc/{pid}/syscall").read_text().split()[0] not in ("running", "-1")


def test_who_waits_for_a_lock_gets_it_or_is_interrupted(plain: Mount) -> None:
    path = os.path.join(plain.path, "locked")
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    other = os.open(path, os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with _waiting(path) as interrupted, _waiting(path) as patient:
        interrupted.send_signal(signal.SIGUSR1)
        out, _ = interrupted.communicate(timeout=allowed_s(60))
        assert out == "interrupted\n"
        assert patient.poll() is None
        fcntl.flock(fd, fcntl.LOCK_UN)
        out, _ = patient.communicate(timeout=allowed_s(60))
        assert out == "has it\n"
    fcntl.flock(other, fcntl.LOCK_EX)  # it ended with its process
    os.close(other)
    os.close(fd)


def test_after_its_process_was_killed_programs_get_errors(plain: Mount) -> None:
    fd = os.open(os.path.join(plain.path, "file"), os.O_RDWR | os.O_CREAT)
    top = os.open(plain.path, os.O_RDONLY | os.O_DIRECTORY)
    plain.process.kill()
    plain.process.wait(allowed_s(60))
    for use in (lambda: os.write(fd, b"x"), lambda: os.stat("other", dir_fd=top), lambda: os.fsync(fd)):
        with pytest.raises(OSError, match="not connected") as caught:
            use()
        assert caught.value.errno == errno.ENOTCONN
    with pytest.raises(OSError, match="not connected"):
        os.close(fd)
    os.close(top)


_READERS = """
import mmap, os, sys, threading
memory = mmap.mmap(-1, 1 << 20)
fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
readers = [threading.Thread(target=os.preadv, args=(fd, [memory], 0)) for _ in range(300)]
for reader in readers:
    reader.start()
for reader in readers:
    reader.join()
print("all read")
"""


def test_reads_that_do_not_go_on_leave_names_alone(tmp_path: Path) -> None:
    with local_mount(str(tmp_path / "source"), str(tmp_path / "place"), natively=False, held=True) as held:
        (tmp_path / "source" / "file").write_bytes(bytes(1 << 20))
        command = [sys.executable, "-c", _READERS, os.path.join(held.path, "file")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as readers:
            wait_until(
                lambda: os.path.exists(os.path.join(held.path, "read")), allowed_s(60), "reads that fill all memory"
            )
            os.mkdir(os.path.join(held.path, "made"))
            assert sorted(os.listdir(held.path)) == ["file", "made"]
            assert not os.path.exists(os.path.join(held.path, "go"))
            out, _ = readers.communicate(timeout=allowed_s(60))
        assert out == "all read\n"


_LOOKS = """
import os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: None)
# A shell that starts the tests in its background has them, and their children, ignore this.
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
print("looks", flush=True)
os.stat(sys.argv[1])
"""


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGQUIT])
def test_who_waits_for_an_answer_is_ended_by_a_signal_behind_one_that_he_catches(
    tmp_path: Path, ending: signal.Signals
) -> None:
    """The kernel tells of the first signal only."""
    with local_mount(str(tmp_path / "source"), str(tmp_path / "place"), natively=False, held=True) as held:
        command = ["prlimit", "--core=0", sys.executable, "-c", _LOOKS, os.path.join(held.path, "held")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as waiting:
            try:
                assert waiting.stdout is not None
                assert waiting.stdout.readline() == "looks\n"
                wait_until(lambda: _in_a_call(waiting.pid), allowed_s(60), "it does not wait")
                waiting.send_signal(signal.SIGUSR1)
                wait_until(lambda: _state(waiting.pid) == "D", allowed_s(60), "the signal was not seen")
                os.statvfs(held.path)  # the kernel has told of the signal before it
                assert waiting.poll() is None
                waiting.send_signal(ending)
                assert waiting.wait(allowed_s(30)) == -ending
            finally:
                held.process.kill()  # else nobody might end it


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_when_it_is_unmounted_its_process_ends_in_order(plain: Mount) -> None:
    Path(plain.path, "file").write_text("there")
    plain.unmount()
    assert "finished" in plain.end()
    assert plain.process.returncode == 0


def test_asked_to_end_it_unmounts(plain: Mount, tmp_path: Path) -> None:
    Path(plain.path, "file").write_text("there")
    plain.process.send_signal(signal.SIGTERM)
    assert "finished" in plain.end()
    assert plain.process.returncode == 0
    assert (tmp_path / "source" / "file").read_text() == "there"


def test_asked_to_end_while_a_file_is_open_it_ends_all_the_same(plain: Mount, tmp_path: Path) -> None:
    fd = os.open(os.path.join(plain.path, "file"), os.O_RDWR | os.O_CREAT)
    os.write(fd, b"written")
    plain.process.send_signal(signal.SIGTERM)
    assert "finished" in plain.end()
    assert plain.process.returncode == 0
    with pytest.raises(OSError, match="not connected"):
        os.write(fd, b"lost")
    with pytest.raises(OSError, match="not connected"):
        os.close(fd)
    assert (tmp_path / "source" / "file").read_bytes() == b"written"


def test_asked_to_end_it_does_not_wait_for_who_waits_for_a_lock(plain: Mount) -> None:
    path = os.path.join(plain.path, "locked")
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with _waiting(path) as patient:
        plain.process.send_signal(signal.SIGTERM)
        assert "finished" in plain.end()
        out, _ = patient.communicate(timeout=allowed_s(60))
        assert "not connected" in out
    with pytest.raises(OSError, match="not connected"):
        os.close(fd)


def test_asked_to_end_while_requests_do_not_go_on_it_leaves_its_place_at_once(tmp_path: Path) -> None:
    """Who is not patient with it kills it then, and no dead mount stays."""
    place = str(tmp_path / "place")
    with local_mount(str(tmp_path / "source"), place, natively=False, held=True) as held:
        listed = Path(f"/proc/{held.process.pid}/mountinfo")
        with subprocess.Popen(["stat", os.path.join(held.path, "held")], stderr=subprocess.DEVNULL) as waiting:
            try:
                wait_until(lambda: _in_a_call(waiting.pid), allowed_s(60), "it does not wait")
                held.process.send_signal(signal.SIGTERM)
                wait_until(lambda: place not in listed.read_text(), allowed_s(60), "the mount stays")
                assert held.process.poll() is None
            finally:
                held.process.kill()


def test_what_others_have_mounted_on_its_place_since_stays_when_it_ends(plain: Mount) -> None:
    with subprocess.Popen(plain.command(["cat"]), stdin=subprocess.PIPE) as inside:
        namespace = ["nsenter", f"--mount=/proc/{inside.pid}/ns/mnt", "--"]
        wait_until(lambda: os.readlink(f"/proc/{inside.pid}/cwd") == plain.place, allowed_s(60), "it is not in it")
        plain.unmount("--lazy")
        subprocess.run([*namespace, "mount", "-t", "tmpfs", "other", plain.place], check=True)
        plain.process.send_signal(signal.SIGTERM)
        assert "finished" in plain.end()
        assert plain.process.returncode == 0
        found = subprocess.run([*namespace, "stat", "-f", "-c", "%T", plain.place], capture_output=True, check=True)
        assert found.stdout == b"tmpfs\n"


def test_many_programs_at_once(plain: Mount) -> None:
    script = "for n in $(seq 60); do mkdir d$1.$n && echo $1 > d$1.$n/f && mv d$1.$n/f g$1.$n && rmdir d$1.$n; done"
    with_all = [
        subprocess.Popen(plain.command(["sh", "-c", script, "sh", str(number)]), stderr=subprocess.PIPE, text=True)
        for number in range(4)
    ]
    for process in with_all:
        _, said = process.communicate(timeout=allowed_s(120))
        assert (process.returncode, said) == (0, "")
    assert len(os.listdir(plain.path)) == 240
