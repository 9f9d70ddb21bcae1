"""Metrics over HTTP: what was counted in the format of Prometheus, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.fs.clusters.meta_service import MetaRig
from tests.support.loops import on_loop

from fireflyer.base.errors import Busy, UsageError
from fireflyer.fs.schema.inodes import ROOT
from fireflyer.fs.schema.manager import FilesStatus, Status
from fireflyer.fs.schema.meta import MakeDirectory, PathRef, Stat
from fireflyer.fs.service.manager.metrics import cluster_series, files_series
from fireflyer.kvstore import MemoryEngine
from fireflyer.runtime.address import Address
from fireflyer.runtime.metrics import Series, exposition, serving_metrics


async def ask(address: Address | None, request: bytes) -> tuple[bytes, str]:
    assert address is not None
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return head.split(b"\r\n")[0], body.decode()


@on_loop
async def test_counts_are_told_to_who_asks_for_metrics() -> None:
    async def collect() -> Sequence[Series]:
        return [
            Series("a_total", "counter", "Of a kind", [({"kind": 'odd " one'}, 3.0), ({"kind": "b"}, 4.0)]),
            Series.one("size_bytes", "gauge", "How large", 5),
        ]

    async with serving_metrics("127.0.0.1:0", collect) as address:
        status, body = await ask(address, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status == b"HTTP/1.1 200 OK"
        found = {
            (sample.name, sample.labels.get("kind", "")): sample.value
            for family in text_string_to_metric_families(body)
            for sample in family.samples
        }
        assert found == {("a_total", 'odd " one'): 3.0, ("a_total", "b"): 4.0, ("size_bytes", ""): 5.0}
        assert (await ask(address, b"GET / HTTP/1.1\r\n\r\n"))[0].endswith(b"404 Not Found")
        assert (await ask(address, b"POST /metrics HTTP/1.1\r\n\r\n"))[0].endswith(b"405 Method Not Allowed")


@on_loop
async def test_a_process_that_cannot_tell_says_why() -> None:
    async def collect() -> Sequence[Series]:
        raise Busy("later")

    async with serving_metrics("127.0.0.1:0", collect) as address:
        status, body = await ask(address, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert (status, body) == (b"HTTP/1.1 503 Service Unavailable", "later\n")
    async with serving_metrics("", collect) as nowhere:
        assert nowhere is None
    with pytest.raises(UsageError):
        async with serving_metrics("nonsense", collect):
            pass


@on_loop
async def test_figures_of_services_are_well_formed() -> None:
    async with MetaRig(MemoryEngine()) as rig:
        await rig.open_session(5)
        for _ in range(2):
            await rig.ask(5, MakeDirectory(PathRef(ROOT, b"d")))
        await rig.ask(5, Stat(PathRef(ROOT)))
        text = exposition(rig.service.metrics()).decode()
    assert 'fireflyer_meta_requests_total{request="MakeDirectory"} 2.0' in text
    assert 'fireflyer_meta_refusals_total{reason="EEXIST"} 1.0' in text
    empty = exposition(cluster_series(Status(1, 1, (), (), ())) + files_series(FilesStatus(1, 2, True, 3, 4, 5)))
    assert b"fireflyer_unlinked_bytes 5.0" in empty
