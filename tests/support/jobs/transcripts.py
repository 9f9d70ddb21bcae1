"""What `ff run` shows on a pipe, with times, paths and numbers that differ from run to run replaced."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.patience import allowed_s

__all__ = ["FF", "Transcript", "ff_environment", "ff_run", "notices"]

FF = (sys.executable, "-m", "fireflyer")
_REPLACED = (
    (re.compile(r"\b(?:\d+ h )?(?:\d+ min )?\d+(?:\.\d+)? (?:ms|s)\b"), "TIME"),
    (re.compile(r"\bstep \d+ \(saved"), "step N (saved"),
)
_MARK = "ff     | "
_STATUS = re.compile(
    r"(?:starting|running|training|failing|restarting|stopping|suspending|finished|step [\d,]+)(?: · .*)?"
)


class Transcript:
    def __init__(self, code: int, out: str, err: str, directory: Path) -> None:
        self.code = code
        self.out = [_normal(line, directory) for line in out.splitlines()]
        self.err = [_normal(line, directory) for line in err.splitlines()]


def _normal(line: str, directory: Path) -> str:
    line = line.replace(f"{os.path.realpath(directory)}/", "").replace(f"{directory}/", "")
    for pattern, word in _REPLACED:
        line = pattern.sub(word, line)
    return line


def notices(shown: Transcript) -> list[str]:
    """What `ff run` says itself before its report, without the status lines, which depend on time."""
    ours = [line.removeprefix(_MARK) for line in shown.out[: shown.out.index("")] if line.startswith(_MARK)]
    return [line for line in ours if not _STATUS.fullmatch(line)]


def ff_environment(**extra: str) -> dict[str, str]:
    dropped = ("NO_COLOR", "COLUMNS", "LINES", "TERM")
    return {name: value for name, value in os.environ.items() if name not in dropped} | {"TERM": "xterm"} | extra


def ff_run(directory: Path, *args: str, script: str = "") -> Transcript:
    """`ff run ARGS job.py` in `directory`, where `script` is the content of `job.py`; the run is in `out`."""
    if script:
        (directory / "job.py").write_text(script, encoding="utf-8")
    done = subprocess.run(
        [*FF, "run", "--run-dir", "out", *args],
        cwd=directory,
        env=ff_environment(),
        capture_output=True,
        text=True,
        timeout=allowed_s(60),
        check=False,
    )
    return Transcript(done.returncode, done.stdout, done.stderr, directory)
