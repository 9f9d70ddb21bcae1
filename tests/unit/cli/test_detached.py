"""Who has started a command, or its terminal, may be gone when it says something."""

from __future__ import annotations

import os
import sys

import pytest

from fireflyer.cli.detached import report, report_failure, tell


def closed_pipe() -> int:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    return write_fd


def test_a_terminal_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = open(closed_pipe(), "w", buffering=1)  # noqa: SIM115 - closing it fails: what was said is still in its buffer
    monkeypatch.setattr(sys, "stdout", gone)
    monkeypatch.setattr(sys, "stderr", gone)
    tell("a service died")
    tell("a service died", err=True)
    report(None, "all is up\n")
    with pytest.raises(BrokenPipeError):
        gone.close()


def test_what_is_up_stays_up_when_who_waited_for_it_is_gone() -> None:
    report(closed_pipe(), "all is up\n")
    report_failure(closed_pipe(), "no port is free")
