"""What a supervisor tells of the end of a rank: from a real process."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from fireflyer.cluster.schema.wire import OutputLine, RankEnd, RankError, RankToStart
from fireflyer.cluster.supervisor import rank as rank_module
from fireflyer.cluster.supervisor.memory_events import MemoryGroup
from fireflyer.cluster.supervisor.rank import RankProcess, is_library
from fireflyer.runtime.log_writer import LogWriter

pytestmark = pytest.mark.processes


def ended(tmp_path: Path, script: str) -> RankEnd:
    """A rank that runs this script to its end."""
    (tmp_path / "job.py").write_text(script)

    async def body() -> RankEnd:
        end: asyncio.Future[RankEnd] = asyncio.get_running_loop().create_future()
        lines: list[OutputLine] = []
        problems: list[str] = []
        writer = LogWriter(full=lambda: None, free=lambda: None, on_log_error=problems.append)
        rank = RankProcess(
            0, 3, writer=writer, on_line=lines.append, on_log_error=problems.append, on_exit=end.set_result
        )
        plan = RankToStart(3, {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")})
        rank.start((sys.executable, str(tmp_path / "job.py")), plan, str(tmp_path / "rank.log"))
        try:
            return await end
        finally:
            rank.close()
            writer.stop()
            assert problems == []

    return asyncio.run(body())


def count_kills(path: Path, kills: int) -> None:
    path.write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")


@pytest.mark.parametrize(("kills", "said"), [(8, "cgroup limit 512 MiB"), (7, "")])
def test_a_sigkill_is_for_memory_if_the_kernel_has_counted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int, said: str
) -> None:
    group = MemoryGroup(str(tmp_path / "control"), str(tmp_path / "limit"))
    count_kills(tmp_path / "control", 7)
    (tmp_path / "limit").write_text(f"{512 << 20}\n")
    monkeypatch.setattr(rank_module, "memory_groups", lambda: [group])
    monkeypatch.setattr(rank_module, "killed_in_kernel_log", lambda *_: "")
    counted = f"open({str(tmp_path / 'control')!r}, 'w').write('oom_kill {kills}\\n')"
    end = ended(tmp_path, f"import os\n{counted}\nos.kill(os.getpid(), 9)")
    assert end == RankEnd(0, 3, 137, False, out_of_memory=said)


def test_the_error_file_counts_before_the_traceback(tmp_path: Path) -> None:
    script = """
import json, os
told = {"message": {"message": "LookupError: no tokens", "extraInfo": {}}}
json.dump(told, open(os.environ["TORCHELASTIC_ERROR_FILE"], "w"))
raise SystemError("of the wrapper")
"""
    assert ended(tmp_path, script).error == RankError("LookupError", "no tokens")


def test_an_error_that_did_not_end_the_rank_is_not_told(tmp_path: Path) -> None:
    script = "import os, sys, traceback\ntry: 1 / 0\nexcept Exception: traceback.print_exc()\n"
    assert ended(tmp_path, script + "sys.stderr.flush()\nos._exit(7)").error is None
    assert ended(tmp_path, script + "sys.stderr.flush()\nos.abort()") == RankEnd(0, 3, 134, False)


def test_what_is_a_library() -> None:
    import asyncio.base_events

    import msgspec

    assert is_library(asyncio.base_events.__file__)
    assert is_library(msgspec.__file__)
    assert is_library(rank_module.__file__)
    assert is_library("<frozen importlib._bootstrap>")
    assert not is_library(__file__)
    assert not is_library("train.py")
