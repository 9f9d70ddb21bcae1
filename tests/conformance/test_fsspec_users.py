"""pandas, pyarrow, DuckDB and checkpoints of torch find what they need of a file system, over a directory here."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.fs.clusters.data_users import with_duckdb, with_pandas, with_pyarrow, with_torch

from fireflyer.fs.spec import FireflyerFileSystem
from fireflyer.fs.tools import connections
from fireflyer.fs.tools.trees import LocalTree


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(connections, "_connect", lambda *_: LocalTree(str(tmp_path)))
    yield "ff://here:1/data"
    connections._shared.clear()
    FireflyerFileSystem.clear_instance_cache()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "use"),
    [("pandas", with_pandas), ("pyarrow", with_pyarrow), ("duckdb", with_duckdb), ("torch", with_torch)],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_it_reads_and_writes_through_ours(url: str, module: str, use: Callable[[str, dict[str, Any]], None]) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    use(url, {})
