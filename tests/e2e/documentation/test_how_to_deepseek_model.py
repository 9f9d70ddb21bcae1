"""What docs/how-to/deepseek-model.md tells users to type works."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
import torch

from fireflyer.recipes.deepseek import train
from fireflyer.recipes.deepseek.weights import read_config

TEXT = (Path(__file__).parents[3] / "docs/how-to/deepseek-model.md").read_text()


def test_the_programs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for program in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
            exec(program, names)
    speculated, replayed = out.getvalue().splitlines()
    assert re.fullmatch(r"True \d+% accepted, \d+ forwards", speculated)
    assert replayed == "True"


@pytest.mark.slow
def test_the_script_shows_falling_losses_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"```bash\npython -m fireflyer.recipes.deepseek.train (.*?)\n```", TEXT)
    smaller = ["--steps", "30", "--batch", "4", "--sequence-length", "64", "--corpus-bytes", "300000"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    said: list[str] = []
    try:
        assert train.main([*shlex.split(command), *smaller], said.append) == 0
    finally:
        torch.set_num_threads(threads)
    pairs = [re.search(r"loss ([\d.]+), prediction module ([\d.]+)", line) for line in said]
    losses = [(float(found[1]), float(found[2])) for found in pairs if found]
    assert len(losses) == 4
    assert losses[-1][0] < losses[0][0] - 0.7
    assert losses[-1][1] < losses[0][1] - 0.7
    assert read_config("model").shape.layers == 4
    assert said[-1] == "saved to model"


def test_wrong_arguments_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--steps", "0"]) == 2
    assert capsys.readouterr().err == "deepseek.train: --steps 0 and --batch 8 must be at least 1\n"
