"""The three ways of docs/how-to/pytorch.md run as they stand in the page, and give the same gradients."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest
from tests.support.how_to import Shell

pytest.importorskip("torch")
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

TEXT: Final = (Path(__file__).parents[3] / "docs/how-to/pytorch.md").read_text()
MODEL: Final = """\
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
"""
TRAIN: Final = """\
model(torch.full((3, 4), 1.0 + dist.get_rank())).sum().backward()
print("WAY", model.module.weight.grad.tolist(), flush=True)
"""


def test_the_three_ways_give_the_same_gradients(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    first = next(block for block in blocks if 'init_process_group("hfreduce", timeout' in block)
    second = next(block for block in blocks if "register_comm_hook(HookState" in block)
    third = next(block for block in blocks if "# was: torch.nn.parallel" in block)
    begin, end = first.split("...\n")
    hook, close = second.split("...\n")
    gloo = next(line for line in third.splitlines() if line.startswith("dist.init_process_group"))
    imports, _, wrap = third.partition(gloo + "\n")
    ways = (
        ["import torch, torch.distributed as dist", MODEL, begin, TRAIN.replace("WAY", "way 1"), end],
        ["import torch, torch.distributed as dist", gloo, MODEL,
         "model = torch.nn.parallel.DistributedDataParallel(model)", hook, TRAIN.replace("WAY", "way 2"), close, end],
        ["import torch, torch.distributed as dist", gloo, MODEL, imports, wrap, TRAIN.replace("WAY", "way 3"), end],
    )  # fmt: skip
    said = ""
    for lines in ways:  # a job each: ranks that join twice may meet the store of the first time
        (tmp_path / "train.py").write_text("\n".join(lines))
        said += Shell(tmp_path).run("ff", "run", "--ranks-per-node", "2", "train.py")
    found = re.findall(r"way (\d) (\[.*\])", said)
    assert sorted(way for way, _ in found) == ["1", "1", "2", "2", "3", "3"], said
    assert {gradient for _, gradient in found} == {str([[4.5] * 4] * 2)}, said
