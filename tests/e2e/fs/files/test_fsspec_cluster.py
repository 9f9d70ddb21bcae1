"""fsspec's own tests of a file system, and what users do with data through it, on a cluster of this machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec.tests.abstract as abstract
import pytest
from tests.support.fs.clusters.data_users import with_duckdb, with_pandas, with_pyarrow, with_torch
from tests.support.fs.clusters.local_cluster import LocalCluster

from fireflyer.fs.spec import FireflyerFileSystem
from fireflyer.fs.tools import connections
from fireflyer.fs.tools.addresses import Address

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]
DATA, USERS, T = "/fsspec-data", "/fsspec-users", "/fsspec-t"


@pytest.fixture(scope="module")
def cluster(shared_cluster: LocalCluster) -> Iterator[LocalCluster]:
    yield shared_cluster
    connections.close_all()
    FireflyerFileSystem.clear_instance_cache()


class OnACluster(abstract.AbstractFixtures):
    @pytest.fixture
    def fs(self, cluster: LocalCluster) -> Iterator[FireflyerFileSystem]:
        found = FireflyerFileSystem(target=f"ff://{cluster.directory}")
        yield found
        if found.exists(DATA):
            found.rm(DATA, recursive=True)

    @pytest.fixture
    def fs_join(self) -> Callable[..., str]:
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def fs_path(self) -> str:
        return DATA


class TestCopy(abstract.AbstractCopyTests, OnACluster):
    test_copy_glob_edge_cases = None  # of names alone: tests/conformance/test_fsspec.py has all of them


class TestGet(abstract.AbstractGetTests, OnACluster):
    test_get_glob_edge_cases = None  # of names alone: tests/conformance/test_fsspec.py has all of them


class TestPut(abstract.AbstractPutTests, OnACluster):
    test_put_glob_edge_cases = None  # of names alone: tests/conformance/test_fsspec.py has all of them


class TestOpen(abstract.AbstractOpenTests, OnACluster): ...


class TestPipe(abstract.AbstractPipeTests, OnACluster): ...


@pytest.mark.parametrize(
    ("module", "use"),
    [("pandas", with_pandas), ("pyarrow", with_pyarrow), ("duckdb", with_duckdb), ("torch", with_torch)],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_it_reads_and_writes_through_ours(
    cluster: LocalCluster, tmp_path: Path, module: str, use: Callable[[str, dict[str, Any]], None]
) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    address = Address(directory=str(cluster.directory))
    use(f"{address.prefix}{USERS}/{module}", {})


def test_a_transaction_and_many_ranges(cluster: LocalCluster) -> None:
    files = FireflyerFileSystem(target=f"ff://{cluster.directory}")
    with files.transaction:
        files.pipe({f"{T}/a": bytes(100), f"{T}/b": b"b" * 100})
        assert not files.exists(f"{T}/a")
    found = files.cat_ranges([f"{T}/a", f"{T}/b", f"{T}/none", f"{T}/b"], [0, 98, 0, None], [2, 200, 5, 3])
    assert [found[0], found[1], found[3]] == [b"\0\0", b"bb", b"bbb"]
    assert isinstance(found[2], FileNotFoundError)
    with files.open(f"{T}/b", "r+b") as file:
        file.seek(3)
        file.write(b"inside")
    with files.open(f"{T}/b", "ab") as file:
        file.write(b"end")
    assert files.cat(f"{T}/b") == b"bbbinside" + b"b" * 91 + b"end"
    with files.open(f"{T}/lines", "wt") as text:
        text.writelines(f"{number}\n" for number in range(3000))
    with files.open(f"{T}/lines", "rb") as lines:
        assert [int(line) for line in lines] == list(range(3000))
