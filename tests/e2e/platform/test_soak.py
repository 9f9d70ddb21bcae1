"""Three minutes of the soak, with the number of the commit as seed, as docs/how-to/soak.md says it."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from tests.support.campaigns.shards import commit_count
from tests.support.how_to import Shell

from fireflyer.recipes.soak.checks import judge
from fireflyer.recipes.soak.facts import SoakFacts
from fireflyer.recipes.soak.plan import SoakPlan
from fireflyer.recipes.soak.report import SoakReport

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "how-to" / "soak.md"
MINUTES = 3.0


def test_a_cluster_that_loses_something_all_the_time_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    (command,) = re.findall(r"^```\n(.*?)\n```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert f"$(BIN)/{command.replace(' 20', ' $(MINUTES)')}" in (ROOT / "Makefile").read_text()
    arguments = [*command.replace(" 20", f" {MINUTES}").split(), "--seed", str(commit_count())]
    said = Shell(tmp_path).run(*arguments, limit_s=820.0)
    assert "Soak · Succeeded" in said
    directory = tmp_path / "build" / "soak"
    report = msgspec.json.decode((directory / "report.json").read_bytes(), type=SoakReport)
    assert report.ok
    assert sum(row.recovered for row in report.kinds) == sum(row.faults for row in report.kinds) >= 4
    facts = msgspec.json.decode((directory / "facts.json").read_bytes(), type=SoakFacts)
    lost = msgspec.structs.replace(facts, stored=facts.stored[1:])
    assert [check.name for check in judge(SoakPlan(), lost) if not check.good] == ["files"]
