"""Logs of services: bounded, of whole lines, whatever the process is killed in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest
from tests.support.patience import allowed_s

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.runtime.service_log import (
    LOG_FILE_VARIABLE,
    MAX_BYTES,
    MAX_LINE_BYTES,
    RotatingLog,
    make_room,
    open_log,
)

MAX: Final = 4096
KEPT: Final = 2
THREADS: Final = 3
WRITER: Final = f"""\
import logging, sys, threading
from fireflyer.runtime.service_log import RotatingLog, start_logging
start_logging(RotatingLog(sys.argv[1], (2,), max_bytes={MAX}, kept={KEPT}))
def write(name):
    for number in range(10**9):
        logging.info("%s %d %s.", name, number, "x" * (number % 50))
threads = [threading.Thread(target=write, args=(name,), daemon=True) for name in "abc"]
for thread in threads:
    thread.start()
print("ready", flush=True)
threads[0].join()
"""


def files_of(path: Path) -> list[Path]:
    """The oldest first."""
    return [
        one for number in (*range(KEPT, 0, -1), 0) if (one := Path(f"{path}.{number}" if number else path)).exists()
    ]


def killed_writer(path: Path, after_s: float) -> None:
    with open(path, "ab") as log:
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, stderr=log)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    until_s = time.monotonic() + allowed_s(30)
    while len(files_of(path)) <= KEPT and time.monotonic() < until_s:
        time.sleep(0.01)
    time.sleep(after_s)  # any moment will do
    process.kill()
    process.communicate()


def test_a_log_is_bounded_and_its_lines_are_whole_whenever_its_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for turn in range(3):
        killed_writer(path, 0.003 * turn)
        files = files_of(path)
        assert all(MAX - 200 < file.stat().st_size <= MAX for file in files[:-1])
        assert files[-1].stat().st_size <= MAX
        assert {one.name for one in tmp_path.iterdir()} <= {"log", "log.1", "log.2", "log.new"}
        last: dict[str, int] = {}
        for line in "".join(file.read_text() for file in files).splitlines():
            match = re.fullmatch(r"\S+ \S+ INFO root ([abc]) (\d+) (x*)\.", line)
            assert match is not None, line
            name, number = match[1], int(match[2])
            assert len(match[3]) == number % 50
            assert number in (last.get(name, number - 1) + 1, 0), "a line is missing"
            last[name] = number


def test_a_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may be killed between two."""
    written: list[bytes] = []
    write = os.write

    def seen(fd: int, data: bytes) -> int:
        written.append(data)
        return write(fd, data)

    path = tmp_path / "log"
    with open(path, "ab") as file:
        monkeypatch.setattr(os, "write", seen)
        log = RotatingLog(str(path), (file.fileno(),), max_bytes=MAX)
        for number in range(500):
            log.say(f"line {number}")
    assert written == [f"line {number}\n".encode() for number in range(500)]


def test_what_strangers_cause_to_be_logged_does_not_take_a_log_beyond_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "log"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        log = RotatingLog(str(path), (fd,), max_bytes=2 * MAX_LINE_BYTES, kept=1)
        for _ in range(5):
            log.say("y" * 10 * MAX_LINE_BYTES)
    finally:
        os.close(fd)
    assert path.stat().st_size <= 2 * MAX_LINE_BYTES
    assert path.read_text().endswith(f"y … ({9 * MAX_LINE_BYTES} more bytes)\n")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["log", "log.1"]


def test_a_line_that_was_torn_by_a_full_disk_or_a_dead_machine_ends_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"whole\nhal")
    with open(path, "ab") as file:
        RotatingLog(str(path), (file.fileno(),)).say("next")
    assert path.read_bytes() == b"whole\nhal\nnext\n"


def test_a_log_that_cannot_be_renamed_loses_old_lines_instead_of_growing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    (tmp_path / "log.new").mkdir()
    with open(path, "ab") as file:
        log = RotatingLog(str(path), (file.fileno(),), max_bytes=MAX)
        for number in range(1000):
            log.say(f"line {number}")
    assert path.stat().st_size <= MAX
    assert path.read_text().endswith("line 999\n")


def test_a_process_is_given_room_in_a_log_that_others_have_filled(tmp_path: Path) -> None:
    path = tmp_path / "log"
    make_room(str(path))
    path.write_bytes(b"x" * MAX_BYTES)
    make_room(str(path))
    assert path.stat().st_size == 0
    assert (tmp_path / "log.1").stat().st_size == MAX_BYTES
    make_room(str(path))
    assert not (tmp_path / "log.2").exists()


@pytest.mark.processes
def test_services_and_nobody_whom_they_start_write_into_the_log_that_they_were_given(tmp_path: Path) -> None:
    path = tmp_path / "log"
    program = (
        "import asyncio, logging, os, sys\n"
        "from fireflyer.cli.fs.processes import run_process\n"
        "async def main(on_ready):\n"
        f"    logging.warning('given %s', os.environ.get({LOG_FILE_VARIABLE!r}))\n"
        "    print('by the interpreter', file=sys.stderr)\n"
        "    os.kill(os.getpid(), 15)\n"
        "    await asyncio.Event().wait()\n"
        "run_process(main)\n"
    )
    path.write_bytes(b"x" * (MAX_BYTES - 30) + b"\n")
    environment = {**os.environ, LOG_FILE_VARIABLE: str(path)}
    with open(path, "ab") as log:
        subprocess.run([sys.executable, "-c", program], stderr=log, env=environment, check=True, timeout=allowed_s(30))
    first, second = path.read_text().splitlines()
    assert first.endswith("WARNING root given None")
    assert second == "by the interpreter"
    assert (tmp_path / "log.1").stat().st_size == MAX_BYTES - 29


def test_a_process_that_was_given_no_log_opens_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"
    path.write_text("x" * (MAX_BYTES - 100))
    log = open_log(str(path))
    log.say("first")
    assert path.read_text() == "first\n"
    assert (tmp_path / "log.1").stat().st_size == MAX_BYTES - 100
    assert path.stat().st_mode & 0o777 == 0o600
    assert capfd.readouterr().err == ""
    for wrong in (tmp_path, tmp_path / "none" / "log"):
        with pytest.raises(FireflyerError, match="write log"):
            open_log(str(wrong))
    with pytest.raises(UsageError, match="not a regular file"):
        open_log("/dev/null")
