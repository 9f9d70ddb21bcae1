"""Nodes that only run agents install `fireflyer` alone: nothing that runs there, and no start of `ff`, needs what the
extra `platform` installs for managers."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

import pytest
from tests.support.patience import allowed_s

ROOT: Final = Path(__file__).parents[3]
PROGRAM: Final = """\
import importlib, pkgutil, sys

refused = set(sys.argv[1].split(","))

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"{name} is not installed on nodes", name=name)

sys.meta_path.insert(0, Refuse())

def import_all(package):
    found = importlib.import_module(package)
    for one in pkgutil.walk_packages(getattr(found, "__path__", ()), f"{package}."):
        if not one.name.endswith("__main__"):
            importlib.import_module(one.name)

for package in filter(None, sys.argv[2].split(",")):
    import_all(package)
from fireflyer.cli.main import main
for words in sys.argv[3:]:
    code = main(words.split())
    assert code == 0, (words, code)
"""


def packages_of_extra() -> list[str]:
    """Names of modules."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [one.partition(">")[0].partition("[")[0] for one in project["optional-dependencies"]["platform"]]
    assert {"litestar", "uvicorn", "sqlalchemy", "alembic", "wsproto", "h11"} <= set(names)
    return names


def without_extra(packages: str, *commands: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-P", "-c", PROGRAM, ",".join(packages_of_extra()), packages, *commands]
    return subprocess.run(argv, capture_output=True, text=True, timeout=allowed_s(60), check=False)


def test_what_runs_on_nodes_needs_no_web_package_and_no_sql() -> None:
    done = without_extra(
        "fireflyer.cluster.agent,fireflyer.cluster.runner,fireflyer.cluster.launcher,fireflyer.cluster.supervisor,"
        "fireflyer.cluster.client,fireflyer.cluster.sdk,fireflyer.cluster.schema",
        "--help",  # imports every command
        "agent run --help",
        "version",
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_refusal_is_one_that_a_manager_meets() -> None:
    """Else the test above would find nothing."""
    done = without_extra("fireflyer.cluster.manager")
    assert done.returncode == 1
    assert "is not installed on nodes" in done.stderr


@pytest.mark.parametrize("command", ["manager run none.toml", "up --dir {tmp}/none"])
def test_who_needs_them_is_told_what_to_install(command: str, tmp_path: Path) -> None:
    done = without_extra("", command.format(tmp=tmp_path))
    found = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(found) == 1, done.stderr[-2000:]
    assert re.fullmatch(r"error: \w+ is not installed; run: pip install 'fireflyer\[platform\]'", found[0])
    assert not (tmp_path / "none").exists()
