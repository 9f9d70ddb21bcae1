"""The script of docs/how-to/checkpoints.md, literally: killed under `ff run` and under torchrun, it ends the same."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.how_to import Shell
from tests.support.patience import allowed_s

from fireflyer.checkpoint import CheckpointManager, TrainingLoop, capture, verify
from fireflyer.cli.main import main

TEXT = (Path(__file__).parents[3] / "docs/how-to/checkpoints.md").read_text()
FF_RUN = [sys.executable, "-m", "fireflyer", "run", "--ranks-per-node", "2"]
FF_RUN += ["--max-restarts", "3", "--run-dir", "run", "train.py"]
# Torch 2.13's torchrun keeps its store over a restart; gloo may then read addresses of dead ranks, and hangs.
NEW_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TORCHRUN += ["--max-restarts", "3", "train.py"]

KILL_RANK_1 = """
import os, signal
if os.environ.get("RANK") == "1" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    import fireflyer.checkpoint.manager as manager
    save = manager.CheckpointManager.save
    def save_or_die(self, step, *arguments, **options):
        if step >= 30:
            self.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return save(self, step, *arguments, **options)
    manager.CheckpointManager.save = save_or_die
"""


def script(name: str) -> str:
    (found,) = re.findall(rf"```python\n(# {name}\n.*?)```", TEXT, re.DOTALL)
    return str(found)


def prepare(directory: Path) -> Path:
    directory.mkdir()
    (directory / "train.py").write_text(script("train.py"))
    (directory / "read.py").write_text(script("read.py"))
    return directory


def launch(directory: Path, command: list[str], *, kill: bool) -> None:
    environment = {**os.environ, **NEW_STORES, "OMP_NUM_THREADS": "1"}
    if kill:
        (directory / "hook").mkdir()
        (directory / "hook" / "sitecustomize.py").write_text(KILL_RANK_1)
        environment["PYTHONPATH"] = str(directory / "hook")
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=allowed_s(300), check=False
    )
    assert done.returncode == 0, (done.stdout, done.stderr)


def newest(directory: Path) -> dict[str, torch.Tensor]:
    path = max((directory / "checkpoints").glob("step-*"))
    assert path.name == "step-00000060"
    tensors = {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}
    # Python's and NumPy's generators are not seeded by the script, nor used.
    return {name: value for name, value in tensors.items() if "rng/python" not in name and "rng/numpy" not in name}


def report(directory: Path) -> str:
    command = [sys.executable, "-m", "fireflyer", "report", "run"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True).stdout


def test_the_commands_on_the_page_are_those_that_run_here() -> None:
    assert "ff run --ranks-per-node 2 --max-restarts 3 --run-dir run train.py" in TEXT
    assert "torchrun --standalone --nproc-per-node 2 --max-restarts 3 train.py" in TEXT
    assert len(script("train.py").splitlines()) <= 46


def test_the_table_of_options_has_each_argument_of_the_loop() -> None:
    (table,) = re.findall(r"## Options\n(.*?)\n\n", TEXT, re.DOTALL)
    described = {
        name for row in re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE) for name in re.findall(r"\w+", row)
    }
    for_tests_and_those_who_embed_it = {"env", "clock"}
    arguments = (
        set(inspect.signature(TrainingLoop).parameters) - {"model", "optimizer"} - for_tests_and_those_who_embed_it
    )
    assert described == arguments


def test_the_commands_for_checkpoints_do_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = re.findall(r"## Look after checkpoints\n```\n(.*?)```", TEXT, re.DOTALL)
    lines = [line.partition("#")[0].split() for line in block.splitlines()]
    assert [line[:2] for line in lines] == [["ff", "ckpt"]] * 7
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "checkpoints", 50)
    save_model(tmp_path / "checkpoints", 60)
    for line in lines:
        assert main(line[1:]) == 0, (line, capsys.readouterr())
    said = capsys.readouterr().out
    assert "step-00000060: whole" in said
    assert "step-00000060: pinned" in said
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*0")] == ["step-00000060"]
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == {"weight", "bias"}
    assert verify(tmp_path / "other")[0].problem is None


def save_model(directory: Path, step: int) -> None:
    with CheckpointManager(directory, rank=0, world_size=1, store=None) as manager:
        manager.save(step, capture(torch.nn.Linear(3, 2)), blocking=True).result()


@pytest.mark.processes
@pytest.mark.slow
def test_the_script_for_dcp_saves_and_loads_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "dcp.py").write_text(script("dcp.py"))
    (command,) = re.findall(r"^torchrun (.* dcp\.py)$", TEXT, re.MULTILINE)
    environment = {**os.environ, **NEW_STORES, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command.split()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=allowed_s(200),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"loaded step 100 norm [1-9]\d*\.\d+\n", done.stdout)
    assert [info.problem for info in verify(tmp_path / "dcp")] == [None]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.campaign(expected_s=50)
@pytest.mark.rotates
@pytest.mark.timeout(900)
def test_killed_under_either_launcher_it_ends_bitwise_as_an_undisturbed_run(tmp_path: Path) -> None:
    whole, ours, theirs = (prepare(tmp_path / name) for name in ("whole", "ours", "theirs"))
    launch(whole, TORCHRUN, kill=False)
    launch(ours, FF_RUN, kill=True)
    launch(theirs, TORCHRUN, kill=True)
    expected = newest(whole)
    assert {name.partition("/")[0] for name in expected} == {"model", "optimizer", "own"}
    for directory in (ours, theirs):
        found = newest(directory)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        shown = report(directory)
        assert "60" in shown
        assert re.search(r"restart|attempt", shown)
        assert "rank 1" in shown, shown
    assert report(whole)
    read = subprocess.run([sys.executable, "read.py"], cwd=ours, capture_output=True, text=True, check=True).stdout
    assert "['0.bias', '0.weight', '3.bias', '3.weight'] 1153 parameters" in read


@pytest.mark.processes
@pytest.mark.slow
def test_the_same_on_3fs(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    (tmp_path / "on_3fs.py").write_text(script("on_3fs.py"))
    with shell.chunk_store(TEXT):
        assert shell.run("python", "on_3fs.py").splitlines() == [
            "step-00000030 30.0",
            "[('step-00000030', None), ('step-00000020', None)]",
            "['manifest.json', 'shard-00000-of-00001.safetensors']",
        ]


@pytest.mark.processes
@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_of_them_with_a_checkpoint(tmp_path: Path) -> None:
    directory = prepare(tmp_path / "run")
    text = (
        (directory / "train.py")
        .read_text()
        .replace("        schedule.step()\n", "        schedule.step()\n        told(step)\n")
    )
    told = "def told(step):\n    import os, signal, time\n    time.sleep(0.05)\n"
    told += f"    if step == 5 and rank == 1:\n        signal.raise_signal({int(signal.SIGTERM)})\n\n"
    (directory / "train.py").write_text(text.replace("reporter = ", told + "reporter = ", 1))
    command = [argument for argument in TORCHRUN if argument not in ("--max-restarts", "3")]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=allowed_s(200), check=False)
    assert "exitcode  : 143" in done.stderr or "143" in done.stderr, done.stderr
    path = max((directory / "checkpoints").glob("step-*"))
    step = json.loads((path / "manifest.json").read_text())["body"]["step"]
    assert 5 <= step < 60


def test_the_line_with_a_period_that_is_chosen_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = re.findall(r'```python\n(loop = .*period="auto".*)\n```', TEXT)
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 2)
    names: dict[str, Any] = {
        "TrainingLoop": TrainingLoop,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    exec(line, names)
    with names["loop"] as loop:
        assert list(loop.steps(2)) == [1, 2]
    assert main(["ckpt", "verify", "checkpoints"]) == 0
