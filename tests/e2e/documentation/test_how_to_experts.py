"""What docs/how-to/experts.md tells users to type works."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest
from tests.support.how_to import Shell

from fireflyer.base.token_formats import TILE_BYTES
from fireflyer.training.experts import shard_experts

TEXT = (Path(__file__).parents[3] / "docs/how-to/experts.md").read_text()


def test_every_argument_and_every_format_is_named() -> None:
    for name in (*inspect.signature(shard_experts).parameters, *TILE_BYTES):
        assert f"`{name}`" in TEXT, name


@pytest.mark.slow
@pytest.mark.processes
def test_the_script_trains_on_two_ranks_saves_and_loads(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    assert "torchrun --standalone --nproc-per-node 2 train.py" in TEXT
    output = Shell(tmp_path).run(
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"
    )
    losses = [float(found) for found in re.findall(r"step \d+: loss ([\d.]+)", output)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 2
    assert (tmp_path / "state").is_dir()
