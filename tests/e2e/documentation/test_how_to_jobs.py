"""What pages about jobs under `ff run` say: restarts.md, suspend.md, check-nodes.md and find-the-hung-rank.md of
docs/how-to, with the commands and messages of the pages, and fewer ranks where a page has eight."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Final

import pytest
from tests.support.how_to import Shell
from tests.support.machines.operated import matches
from tests.support.patience import allowed_s

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

PAGES: Final = Path(__file__).parents[3] / "docs" / "how-to"
FEWER: Final = ("--ranks-per-node 8", "--ranks-per-node 2")
FAILS: Final = """\
import os, time
if os.environ["RANK"] == "1":
    raise ValueError("bad batch shape (3, 4)")
time.sleep(60)
"""


def blocks(page: str, language: str = "") -> list[str]:
    text = (PAGES / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def typed(directory: Path, command: str) -> tuple[int, str]:
    """In the shell of a user: exit code, and both outputs."""
    shell = Shell(directory)
    shell.run("true")  # makes `ff` and `python` known
    env = {**os.environ, "PATH": f"{directory}/bin:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-c", command], cwd=directory, env=env, capture_output=True, text=True, timeout=allowed_s(120),
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_a_job_that_fails_in_the_same_way_again_says_why_it_ended(tmp_path: Path) -> None:
    command, errors = blocks("restarts.md")
    (tmp_path / "train.py").write_text(FAILS)
    code, said = typed(tmp_path, command.replace(*FEWER))
    assert code == 1
    assert "attempt 0" in said
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    promised = errors.splitlines()[0].replace("rank 2", "rank 1").replace("train.py:41", "….py:3").partition(";")[0]
    assert matches([f"{promised}…"], line), line
    assert "not restarted: attempt 0 failed in the same way" in line
    log = re.findall(r"its log is (\S+)", line)[0]
    assert "bad batch shape" in Path(tmp_path, log).read_text()


def test_a_job_is_suspended_and_goes_on_where_it_was(tmp_path: Path) -> None:
    loop, state = blocks("suspend.md", "python")
    before = "first, last, train, epoch = get_whole_life_state() or 1, 10_000, lambda step: time.sleep(0.01), 7\n"
    save = "def save(step):\n    set_whole_life_state(step)\n    print('saved', step, flush=True)\n"
    imports = f"import time\n{state.splitlines()[0]}\n"
    (tmp_path / "train.py").write_text(f"{imports}{before}print('begins at', first, flush=True)\n{save}{loop}")
    assert "--suspend-after 20s train.py" in (PAGES / "suspend.md").read_text()
    command = "ff run --ranks-per-node 2 --suspend-after 1s train.py"
    code, said = typed(tmp_path, command)
    assert code == 85, said
    steps = set(re.findall(r"saved (\d+)", said))
    assert len(steps) == 1, f"all ranks save the same step: {said}"
    (step,) = steps
    assert f"; resume with FF_WHOLE_LIFE_STATE={step}; " in said.splitlines()[-1]
    code, said = typed(tmp_path, f"FF_WHOLE_LIFE_STATE={step} {command}")
    assert code == 85, said
    assert f"begins at {step}" in said


def test_the_check_of_nodes_says_what_it_found_and_a_sound_node_ends_the_job(tmp_path: Path) -> None:
    command, _, by_hand = blocks("check-nodes.md")
    (tmp_path / "train.py").write_text(FAILS)
    code, said = typed(tmp_path, command.replace(*FEWER))
    assert code == 1, said
    assert "ValueError: bad batch shape (3, 4)" in said
    assert "attempt 1" not in said, "a sound node: the failure is the script's"
    shown = by_hand.splitlines()
    small = shown[0].removeprefix("$ ").replace("8GiB", "64MiB")
    code, said = typed(tmp_path, small)
    assert code in (0, 2), said
    assert re.search(r"^memory  ok     64.0 MiB were written and read back$", said, re.MULTILINE), said
    assert re.search(r"^disk    ok     .* a file was written, synced and read back$", said, re.MULTILINE), said


HANGS: Final = """\
import sys, time
import numpy as np
from fireflyer.base.units import SECOND
from fireflyer.collectives import Communicator
from fireflyer.runtime import read_environment

env = read_environment()
values = np.zeros(int(sys.argv[1]), dtype=np.float32)
with Communicator.from_environment(read_environment(), timeout_ns=2 * SECOND) as comm:
    for step in range(43):
        if step == 40 and env.rank == 2:
            time.sleep(600)  # a file server
        comm.allreduce(values)
"""


def test_the_rank_that_hung_is_named_by_the_error_and_by_explain(tmp_path: Path) -> None:
    first, stacks, *_ = blocks("find-the-hung-rank.md")
    (tmp_path / "train.py").write_text(HANGS)
    run, explain = re.findall(r"^\$ (.*)$", first, re.MULTILINE)
    size = 50_000
    code, said = typed(tmp_path, f"{run} {size}")
    assert code == 1, said
    assert "note: ranks wrote flight recorder dumps; to see which rank held up the others: " + explain in said
    assert "rank 2 (node 1, host" in said
    assert "has not entered allreduce #40" in said
    code, said = typed(tmp_path, explain)
    assert code == 0, said
    verdict = first.partition("\nASLEEP")[2].splitlines()
    shown = [line for line in verdict if line.startswith(("rank 2", "  - "))][:3]
    lines = ["ASLEEP in group attempt-0/collectives/world/1", *shown]
    for line in lines:
        wanted = line.replace("5000000", str(size)).replace("host vm", "host …").replace("2.1 s", "…")
        assert matches([wanted], said), (wanted, said)
    found = (tmp_path / "runs/hang/logs/attempt-0/rank-2.stacks").read_text()
    assert stacks.splitlines()[0].partition(" ")[0] in found
    assert "train.py" in found
