"""What docs/how-to/ucx.md says of `transport` holds, over what UCX has on one machine."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import pytest
from tests.support.how_to import Shell

from fireflyer.native import ucx_module

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TEXT: Final = (Path(__file__).parents[3] / "docs/how-to/ucx.md").read_text()
SCRIPT: Final = """\
import numpy as np
from fireflyer.collectives import Communicator
from fireflyer.runtime import read_environment

env, values = read_environment(), np.ones(100_000, dtype=np.float32)
"""


def test_a_job_runs_over_the_transport_that_it_names(tmp_path: Path) -> None:
    (there,) = re.findall(r"^\$ python -c '(.*)'\n(?:True)$", TEXT, re.MULTILINE)
    shell = Shell(tmp_path)
    has_ucx = shell.run("python", "-c", there).strip()
    assert has_ucx == str(os.path.exists(ucx_module()))
    if has_ucx != "True":
        pytest.skip("this build has no UCX")
    made, shown = re.findall(r"```python\n(comm = .*?)\n(print.*?)\n```", TEXT, re.DOTALL)[0]
    (tmp_path / "train.py").write_text(
        f"{SCRIPT}{made}\n{shown}\ncomm.allreduce(values)\nassert values[0] == 2\ncomm.close()\n"
    )
    (run,) = re.findall(r"^(ff run --transport ucx.*)$", TEXT, re.MULTILINE)
    said = shell.run("sh", "-c", run.replace("16", "2").replace("--ranks-per-node 8", "--ranks-per-node 1"))
    assert len(re.findall(r"\bucx$", said, re.MULTILINE)) == 2, said
