"""What users type who read docs/how-to, in a directory of their own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.jobs.cleanup import cleaned_up_at_exit
from tests.support.patience import allowed_s

__all__ = ["Shell"]

LIMIT_S: Final = 200.0


@dataclass(frozen=True, slots=True)
class Shell:
    directory: Path

    def run(self, *command: str, limit_s: float = LIMIT_S) -> str:
        """What it prints; `ff` is this one, and `python` the one that has it, as in an environment that is active."""
        programs = self.directory / "bin"
        if not programs.exists():
            programs.mkdir()
            for name, arguments in (("ff", " -P -m fireflyer"), ("python", "")):
                program = programs / name
                program.write_text(f'#!/bin/sh\nexec {sys.executable}{arguments} "$@"\n')
                program.chmod(0o755)
        env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
        env.pop("FIREFLYER_FS", None)
        done = subprocess.run(
            command,
            cwd=self.directory,
            env=env,
            capture_output=True,
            text=True,
            timeout=allowed_s(limit_s),
            check=False,
        )
        assert done.returncode == 0, (done.stdout, done.stderr)
        return done.stdout

    @contextlib.contextmanager
    def ended_platform(self) -> Iterator[None]:
        """The platform that `ff up` started here ends behind the block, also where that fails."""
        place = ("--dir", str(self.directory / "platform"))
        with cleaned_up_at_exit((sys.executable, "-P", "-m", "fireflyer", "down", "--force", *place)):
            try:
                yield
            finally:
                self.run("ff", "down")

    @contextlib.contextmanager
    def chunk_store(self, text: str) -> Iterator[None]:
        """It runs in the block, as `text` says."""
        assert "`ff fs up --dir fs -d`" in text
        place = ("--dir", str(self.directory / "fs"))
        with cleaned_up_at_exit((sys.executable, "-P", "-m", "fireflyer", "fs", "down", "--force", *place)):
            self.run("ff", "fs", "up", "--dir", "fs", "-d")
            try:
                yield
            finally:
                self.run("ff", "fs", "down", "--dir", "fs")
