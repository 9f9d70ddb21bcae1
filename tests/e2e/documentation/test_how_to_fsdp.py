"""What docs/how-to/fsdp.md tells users to type works."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest
from tests.support.how_to import Shell

from fireflyer.training.fsdp import shard

TEXT = (Path(__file__).parents[3] / "docs/how-to/fsdp.md").read_text()


def test_every_argument_is_named() -> None:
    for name in [*inspect.signature(shard).parameters][2:]:
        assert f"`{name}`" in TEXT, name


@pytest.mark.slow
@pytest.mark.processes
def test_the_script_trains_on_two_ranks_and_prints_its_cost(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    assert "torchrun --standalone --nproc-per-node 2 train.py" in TEXT
    output = Shell(tmp_path).run(
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"
    )
    assert "bytes of shadows and 4.0 of gradient" in output
    assert "120 steps" in output
    assert "PoolUse(held_bytes=" in output
