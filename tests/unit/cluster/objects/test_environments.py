"""Environments: built once, complete or not used, one builder, errors with the last lines, bounded in time and size."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.support.deep_tree import deep_tree

from fireflyer.base.errors import FireflyerError, JobFailed, NoSpace, NotFound, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.objects import EnvironmentCache, LockFile, check_environment
from fireflyer.cluster.objects.environments import environment_name
from fireflyer.cluster.objects.trees import tree_bytes

LOCK = LockFile("requirements.txt", b"six==1.17.0\n")
OTHER = LockFile("requirements.txt", b"six==1.16.0\n")

UV = """#!/bin/sh
# uv as far as it is called: makes the environment, and says what it was asked for.
set -e
echo "$@" >> {log}
if [ "$1" = venv ]; then
  for path in "$@"; do :; done
  mkdir -p "$path/bin"; ln -s {python} "$path/bin/python"; exit 0
fi
{rest}
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def cache_of(tmp_path: Path, rest: str = "", **options: Any) -> EnvironmentCache:
    program = tmp_path / "uv"
    program.write_text(UV.format(log=tmp_path / "log", python=sys.executable, rest=rest))
    program.chmod(0o755)
    return EnvironmentCache(str(tmp_path / "environments"), uv=str(program), **options)


def builds(log: Path) -> int:
    return log.read_text().count("pip sync") if log.exists() else 0


def test_an_environment_is_built_once_and_found_by_later_processes(tmp_path: Path, log: Path) -> None:
    with cache_of(tmp_path).get(LOCK) as first, cache_of(tmp_path).get(LOCK) as second:
        assert first.path == second.path
        assert subprocess.run([first.python, "-c", "print(6)"], capture_output=True, check=True).stdout == b"6\n"
    assert builds(log) == 1


def test_another_lock_python_or_machine_is_another_environment(tmp_path: Path) -> None:
    names = {
        environment_name(lock, python, machine)
        for lock in (LOCK, OTHER, LockFile("pylock.toml", LOCK.data))
        for python in ("3.11", "3.12")
        for machine in ("x86_64", "aarch64")
    }
    assert len(names) == 12


def test_of_several_who_want_it_one_builds(tmp_path: Path, log: Path) -> None:
    cache = cache_of(tmp_path, "sleep 0.2")
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: cache.get(LOCK), range(8)))
    assert builds(log) == 1
    for environment in found:
        environment.close()


def test_a_build_that_fails_says_its_last_lines_as_text(tmp_path: Path) -> None:
    cache = cache_of(
        tmp_path, r"for n in $(seq 100); do echo line $n; done; printf '\033[31mno such package\n' >&2; exit 3"
    )
    with pytest.raises(JobFailed, match=r"exit code 3\): .*line 99 \| line 100 \| no such package$") as raised:
        cache.get(LOCK)
    assert raised.value.exit_code == 3
    assert raised.value.message.isprintable()


def test_who_waited_for_a_build_that_failed_does_not_repeat_it_and_who_asks_later_does(
    tmp_path: Path, log: Path
) -> None:
    """The first one builds until all others wait."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    cache = cache_of(tmp_path, f"read line < {gate}; echo broken; exit 1")
    errors: list[str] = []
    waiting = threading.Semaphore(0)
    wait_for_builder = cache._wait_for_builder

    def waits(place: Any, stopped: Any) -> Any:
        waiting.release()
        return wait_for_builder(place, stopped)

    cache._wait_for_builder = waits  # type: ignore[method-assign]

    def ask() -> None:
        with pytest.raises(JobFailed) as raised:
            cache.get(LOCK)
        errors.append(raised.value.message)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in threads:
        waiting.acquire()
    with gate.open("w") as file:
        file.write("go\n")
    for thread in threads:
        thread.join()
    assert len(errors) == 4
    assert all("broken" in one for one in errors)
    first = builds(log)
    assert first <= 2, "one may have come to the lock after the failure"
    cache_of(tmp_path).get(LOCK).close()
    assert builds(log) == first + 1


def test_a_build_that_takes_too_long_is_ended_with_all_it_started(tmp_path: Path) -> None:
    for limit_ns in (SECOND // 2, 4 * SECOND, 30 * SECOND):  # a loaded machine has not begun it after the first ones
        cache = cache_of(tmp_path, f"sleep 1000 & echo $! > {tmp_path}/child; wait", build_ns=limit_ns)
        with pytest.raises(JobFailed, match="took longer than"):
            cache.get(LOCK)
        if (tmp_path / "child").exists():
            break
    child = int((tmp_path / "child").read_text())
    status = Path(f"/proc/{child}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] in "ZX"


@pytest.mark.processes
@pytest.mark.parametrize("code", [0, 3])
def test_nothing_that_a_build_started_outlives_it(tmp_path: Path, code: int) -> None:
    """A package's code may take a session of its own, and an environment without marks."""
    left = tmp_path / "left"
    fork = f"setsid env -i /bin/sh -c 'echo $$ > {left}.part; mv {left}.part {left}; exec sleep 1000'"
    cache = cache_of(tmp_path, f"{fork} & while [ ! -e {left} ]; do sleep 0.01; done; exit {code}")
    with contextlib.suppress(JobFailed):
        cache.get(LOCK).close()
    status = Path(f"/proc/{int(left.read_text())}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_what_a_killed_builder_left_is_not_used(tmp_path: Path, log: Path) -> None:
    cache = cache_of(tmp_path)
    with cache.get(LOCK) as environment:
        path = Path(environment.path)
    Path(f"{path.parent}.complete").unlink()
    (path / "half").write_text("")
    with cache.get(LOCK):
        assert builds(log) == 2
        assert not (path / "half").exists()


def test_the_least_recently_used_environment_leaves_but_never_one_in_use(tmp_path: Path, log: Path) -> None:
    cache = cache_of(tmp_path, "head -c 10000 /dev/zero > big", max_bytes=15_000)
    locks = [LockFile("requirements.txt", f"six=={n}".encode()) for n in range(4)]
    with cache.get(locks[0]) as used:
        cache.get(locks[1]).close()
        cache.get(locks[2]).close()  # the second one leaves
        assert os.path.exists(used.python)
        with cache.get(locks[2]), pytest.raises(NoSpace, match="in use"):
            cache.get(locks[3])
    cache.get(locks[3]).close()
    assert builds(log) == 4


def test_it_is_in_use_as_long_as_a_process_has_its_descriptor(tmp_path: Path) -> None:
    cache = cache_of(tmp_path, "head -c 10000 /dev/zero > big", max_bytes=5_000)
    environment = cache.get(LOCK)
    process = subprocess.Popen(["sleep", "1000"], pass_fds=[environment.fd])
    environment.close()
    try:
        with pytest.raises(NoSpace, match="in use"):
            cache.get(OTHER)
    finally:
        process.kill()
        process.wait()
    cache.get(OTHER).close()


@pytest.mark.slow
def test_pip_builds_an_environment_from_requirements(tmp_path: Path) -> None:
    """Without an index: a package of this test's own."""
    source = tmp_path / "source"
    source.mkdir()
    wheel = source / "ours-1.0-py3-none-any.whl"
    _write_wheel(wheel)
    cache = EnvironmentCache(str(tmp_path / "environments"), pip_arguments=["--no-index", "--find-links", str(source)])
    with cache.get(LockFile("requirements.txt", b"ours==1.0\n")) as environment:
        told = subprocess.run([environment.python, "-c", "import ours; print(ours.X)"], capture_output=True, check=True)
        assert told.stdout == b"42\n"
    good = hashlib.sha256(wheel.read_bytes()).hexdigest()
    never = "sys_platform == 'no-such-platform'"
    lock = (
        'version = 1\n[[package]]\nname = "mine"\nsource = { virtual = "." }\n'
        f'dependencies = [{{ name = "ours" }}, {{ name = "other", marker = "{never}" }}]\n'
        '[[package]]\nname = "ours"\nversion = "1.0"\nsource = { registry = "x" }\n'
        f'wheels = [{{ hash = "sha256:{good}" }}]\n'
        '[[package]]\nname = "other"\nversion = "1.0"\nsource = { registry = "x" }\n'
        f'wheels = [{{ hash = "sha256:{good}" }}]\n'
    )
    with cache.get(LockFile("uv.lock", lock.encode())) as environment:
        subprocess.run([environment.python, "-c", "import ours"], check=True)
    wrong = b"ours==1.0 --hash=sha256:" + b"0" * 64
    with pytest.raises(JobFailed, match=r"(?i)hash"):
        cache.get(LockFile("requirements.txt", wrong))


def _write_wheel(path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("ours.py", "X = 42\n")
        wheel.writestr("ours-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: ours\nVersion: 1.0\n")
        wheel.writestr(
            "ours-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("ours-1.0.dist-info/RECORD", "")


def test_a_build_sees_no_secrets_of_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIREFLYER_SECRET", "of-the-agent")
    monkeypatch.setenv("PIP_INDEX_URL", "http://index.example")
    cache_of(tmp_path, f"env > {tmp_path}/env").get(LOCK).close()
    text = (tmp_path / "env").read_text()
    assert "of-the-agent" not in text
    assert "index.example" in text


@pytest.fixture
def entered_by_all() -> Iterator[Path]:
    """Not below pytest's own directory: each session that begins takes the rights of others to that away."""
    with tempfile.TemporaryDirectory(prefix="ff-environments-", dir="/tmp") as made:
        os.chmod(made, 0o711)
        yield Path(made)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another account")
def test_an_account_builds_what_only_it_may_change(entered_by_all: Path) -> None:
    cache = cache_of(entered_by_all, "id -u > uid", account=(12345, 23456))
    (entered_by_all / "log").touch(0o666)
    (entered_by_all / "log").chmod(0o666)
    with cache.get(LOCK) as environment:
        directory = Path(environment.path).parent
        assert (directory / "uid").read_text() == "12345\n"
        assert directory.stat().st_uid == 12345
        assert directory.parent.stat().st_uid == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another account")
def test_a_link_that_the_account_puts_in_place_of_the_lock_file_gives_it_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may do so from the moment on at which the directory is its own."""
    of_root = tmp_path / "of root"
    of_root.write_text("")
    chown = os.chown

    def watched(path: str, uid: int, gid: int, **options: Any) -> None:
        chown(path, uid, gid, **options)
        locked = Path(path) / LOCK.kind
        if locked.exists():
            locked.unlink()
            locked.symlink_to(of_root)

    monkeypatch.setattr(os, "chown", watched)
    with pytest.raises(FireflyerError):
        cache_of(tmp_path, "exit 1", account=(65534, 65534)).get(LOCK)
    assert of_root.stat().st_uid == 0


def test_an_environment_of_the_user_is_checked(tmp_path: Path) -> None:
    assert check_environment(sys.prefix) == os.path.join(sys.prefix, "bin", "python")
    with pytest.raises(UsageError, match="absolute"):
        check_environment("venv")
    with pytest.raises(UsageError, match="is missing or not executable"):
        check_environment(str(tmp_path))


def test_lock_files_are_told_by_their_names(tmp_path: Path) -> None:
    for name, kind in (("requirements.txt", "requirements.txt"), ("pylock.toml", "pylock.toml")):
        (tmp_path / name).write_bytes(LOCK.data)
        assert LockFile.read(str(tmp_path / name)) == LockFile(kind, LOCK.data)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no lock file"):
        LockFile.read(str(tmp_path / "setup.py"))
    with pytest.raises(NotFound):
        LockFile.read(str(tmp_path / "none.txt"))


def test_a_node_without_uv_says_what_it_can_build(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs uv"):
        EnvironmentCache(str(tmp_path)).get(LockFile("pylock.toml", b""))


def test_an_environment_of_any_depth_is_measured_and_removed(tmp_path: Path) -> None:
    """Code of a user makes it, and the agent removes it, and those of other accounts after it."""
    cache = cache_of(tmp_path)
    with cache.get(LOCK) as environment:
        pass
    with deep_tree(environment.path):
        assert tree_bytes(environment.path) > 1 << 60
        assert cache.collect(-SECOND) == 1
        assert not os.path.lexists(environment.path)
