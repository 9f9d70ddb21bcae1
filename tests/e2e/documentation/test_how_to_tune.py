"""What docs/how-to/tune-collectives.md tells users to type works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.support.patience import allowed_s

from fireflyer.collectives import Plan, Speeds, plan_for
from fireflyer.collectives.planning.declaration import Declaration

TEXT = (Path(__file__).parents[3] / "docs/how-to/tune-collectives.md").read_text()


def block(language: str, holds: str) -> str:
    """The first block of code of that language that holds some text, less its indentation."""
    for indent, code in re.findall(rf"^( *)```{language}\n(.*?)^ *```$", TEXT, re.DOTALL | re.MULTILINE):
        if holds in code:
            return re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)
    raise AssertionError(f"no block of {language} with {holds}")


def test_the_topology_is_one() -> None:
    declaration = msgspec.toml.decode(block("toml", "[speeds]"), type=Declaration)
    assert declaration.zones == (0, 0, 1, 1)
    assert declaration.speeds.bytes_per_s == 1.2e9


def test_every_key_is_named() -> None:
    for name in (*Declaration.__struct_fields__, *Speeds.__struct_fields__):
        assert f"`{name}`" in TEXT or f"[{name}]" in TEXT, name


def test_the_plan_of_a_program_of_ones_own() -> None:
    names: dict[str, object] = {"Speeds": Speeds, "plan_for": plan_for}
    exec("\n".join(block("python", "plan_for(").splitlines()[2:-1]), names)
    assert isinstance(names["plan"], Plan)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("option", ["--topology network.toml", "--tune"])
def test_the_script_runs(tmp_path: Path, option: str) -> None:
    assert f"ff run --nodes 4 {option} time_sums.py" in TEXT
    (tmp_path / "time_sums.py").write_text(block("python", "# time_sums.py"))
    (tmp_path / "network.toml").write_text(block("toml", "[speeds]"))
    command = [sys.executable, "-m", "fireflyer", "run", "--nodes", "4", *option.split(), "time_sums.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=allowed_s(120))
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^rank 0 \| [0-9]+ KiB: [0-9.]+ ms, ", done.stdout, re.MULTILINE)) == 3
    assert "group world: 4 ranks on 4 nodes" in done.stdout + done.stderr
