"""The event log's file: whole lines, also when the disk is full."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fireflyer.base.errors import Exists, NoSpace
from fireflyer.base.events import AttemptStarted, Logged, decode_log
from fireflyer.cluster.launcher.event_log import EventLog


def entry(number: int) -> Logged:
    return Logged(number, AttemptStarted(number))


def read(path: str) -> list[Logged]:
    with open(path, "rb") as file:
        return decode_log(file)


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    log = EventLog(str(tmp_path), "events.jsonl")
    assert os.path.getsize(log.path) == 0
    for number in range(10):
        log.append(entry(number))
    log.sync()
    log.close()
    assert not log.empty
    assert read(log.path) == [entry(number) for number in range(10)]
    assert os.stat(log.path).st_mode & 0o777 == 0o600


def test_an_older_log_is_never_touched(tmp_path: Path) -> None:
    EventLog(str(tmp_path), "events.jsonl").close()
    with pytest.raises(Exists):
        EventLog(str(tmp_path), "events.jsonl")


def test_a_full_disk_is_told_once_and_nothing_more_is_written(tmp_path: Path) -> None:
    log = EventLog(str(tmp_path), "events.jsonl")
    log.append(entry(0))
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log._fd)
    os.close(full)
    with pytest.raises(NoSpace, match=r"events\.jsonl"):
        log.append(entry(1))
    log.append(entry(2))
    log.sync()
    assert read(log.path) == [entry(0)]


def test_a_line_that_was_written_in_part_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(str(tmp_path), "events.jsonl")
    log.append(entry(0))
    write, calls = os.write, [0]

    def short(fd: int, data: bytes) -> int:
        calls[0] += 1
        if calls[0] == 1:
            return write(fd, data[:7])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", short)
    with pytest.raises(NoSpace):
        log.append(entry(1))
    monkeypatch.undo()
    with open(log.path, "rb") as file:
        assert file.read().endswith(b"}\n")
    assert read(log.path) == [entry(0)]


def test_an_empty_log_can_be_taken_back(tmp_path: Path) -> None:
    log = EventLog(str(tmp_path), "events.jsonl")
    log.remove()
    assert os.listdir(tmp_path) == []
