"""Transfers of reads and writes have the bytes that the machines of clients and replicas send."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.support.fs.chain_sim.request_rig import Bench
from tests.support.fs.chain_sim.rig import OFFLINE, SERVING, SYNCING, MessageInTransit, Rig, is_put, write

from fireflyer.base.errors import UsageError
from fireflyer.fs.client.transfers import FileTransfers
from fireflyer.fs.core.files.chunk_map import ChunkMap
from fireflyer.fs.core.requests.effects import QuerySpec
from fireflyer.fs.schema.chunks import QueryKind
from fireflyer.fs.schema.ids import ChunkId
from fireflyer.fs.schema.inodes import Layout
from fireflyer.fs.schema.routing import Chain, Member, Routing, TargetState
from fireflyer.netsim import Settings, simulate
from fireflyer.topology.fabrics import NodeGroup, two_layer_tree
from fireflyer.topology.traffic import Transfer, check_transfers

CHUNK_BYTES = 1 << 16
CLIENT, STORAGE = 0, {number: number for number in range(1, 7)}
"""Storage node n is node n of the network; the client is node 0."""


def chain(number: int, *states: str, first: int = 1) -> Chain:
    members = tuple(Member(100 * number + n, n, TargetState(state)) for n, state in enumerate(states, first))
    return Chain(number, 1, members)


TWO_CHAINS = Routing(1, chains=(chain(1, SERVING, SERVING, SERVING), chain(2, SERVING, SERVING, SERVING, first=4)))


def file_over(*chains: int) -> ChunkMap:
    return ChunkMap(Layout(1, CHUNK_BYTES, len(chains), 1), chains)


def bytes_of(transfers: list[Transfer]) -> Counter[tuple[int, int]]:
    check_transfers(transfers, 7)
    found: Counter[tuple[int, int]] = Counter()
    for one in transfers:
        found[one.source, one.target] += one.nbytes
    return found


@pytest.mark.parametrize(
    "states", [(SERVING,), (SERVING, SERVING), (SERVING, SERVING, SERVING), (SERVING, SERVING, SYNCING, OFFLINE)]
)
def test_a_write_sends_between_nodes_what_the_replicas_send(states: tuple[str, ...]) -> None:
    """The replicas are the machines of storage nodes; what they forward is counted as it is delivered."""
    rig = Rig(*states)
    counted: Counter[tuple[int, int]] = Counter()
    sizes = (CHUNK_BYTES, CHUNK_BYTES, 1000)

    def count_data(sent: MessageInTransit) -> bool:
        counted[sent.source, sent.target] += len(sent.data)
        return False

    for number, size in enumerate(sizes):
        data = bytes(size)
        rig.update(1, write(data), data, chunk=ChunkId(1, number), sequence=number + 1)
        counted[CLIENT, 1] += size
        rig.run(drop=count_data)
    forwarded = {pair: size for pair, size in counted.items() if size}
    found = FileTransfers(Routing(1, chains=(chain(1, *states),)), STORAGE).writes(
        CLIENT, file_over(1), 0, 2 * CHUNK_BYTES + 1000
    )
    assert bytes_of(found) == forwarded


def test_only_what_is_put_has_data() -> None:
    """Else the count above would be of something else."""
    rig = Rig(SERVING, SERVING)
    rig.update(1, write(b"data"), b"data")
    with_data = rig.run(drop=lambda sent: bool(sent.data))
    assert [is_put(sent) for sent in with_data] == [True]


def test_reads_are_spread_over_the_replicas_as_clients_spread_them() -> None:
    bench = Bench(1, 2, 3)
    for number in range(12):
        bench.begin(QuerySpec(QueryKind.READ, 0, CHUNK_BYTES), ChunkId(1, number))
    counted: Counter[tuple[int, int]] = Counter()
    for ask in bench.asks:
        counted[ask.node, CLIENT] += CHUNK_BYTES
    assert sum(counted.values()) == 12 * CHUNK_BYTES
    routing = Routing(1, chains=(chain(1, SERVING, SERVING, SERVING, OFFLINE),))
    found = FileTransfers(routing, STORAGE).reads(CLIENT, file_over(1), 0, 12 * CHUNK_BYTES)
    assert bytes_of(found) == counted


def test_a_striped_read_begins_a_chunk_when_one_has_arrived() -> None:
    found = FileTransfers(TWO_CHAINS, STORAGE, first_id=50).reads(
        CLIENT, file_over(1, 2), CHUNK_BYTES // 2, 4 * CHUNK_BYTES, window=2
    )
    assert [one.id for one in found] == list(range(50, 55))
    assert all(found[place - 2].id in found[place].after for place in range(2, 5))
    assert [one.nbytes for one in found] == [CHUNK_BYTES // 2, *[CHUNK_BYTES] * 3, CHUNK_BYTES // 2]
    assert len({one.source for one in found}) > 2


def test_a_write_passes_the_chain_one_replica_after_the_other() -> None:
    found = FileTransfers(TWO_CHAINS, STORAGE).writes(CLIENT, file_over(1), 0, 2 * CHUNK_BYTES, window=1)
    assert [(one.source, one.target, set(one.after)) for one in found] == [
        (0, 1, set()),
        (1, 2, {0}),
        (2, 3, {1}),
        (0, 1, {0, 2}),
        (1, 2, {1, 3}),
        (2, 3, {2, 4}),
    ]


def test_windows_that_are_wide_enough_fill_the_nic_of_the_client() -> None:
    fabric = two_layer_tree([NodeGroup(kind="any", count=7)], radix=8, gbit_per_s=200)
    size = 64 * CHUNK_BYTES
    times = {}
    for window in (1, 6, 0):
        found = FileTransfers(TWO_CHAINS, STORAGE).writes(CLIENT, file_over(1, 2), 0, size, window=window)
        times[window] = simulate(fabric, found, Settings(routing="adaptive")).makespan_s
    alone_s = size / fabric.link_bytes_per_s
    assert times[1] == pytest.approx(3 * alone_s, rel=1e-6), "each chunk waits for three hops"
    assert alone_s < times[0] <= times[6] < 1.1 * alone_s


def test_chains_without_a_node_that_serves_are_refused() -> None:
    routing = Routing(1, chains=(chain(1, OFFLINE, OFFLINE), chain(2, SERVING, SERVING)))
    with pytest.raises(UsageError, match="serves chain 1"):
        FileTransfers(routing, STORAGE).reads(CLIENT, file_over(1), 0, 1)
    with pytest.raises(UsageError, match="no storage node serves chain 1"):
        FileTransfers(routing, STORAGE).writes(CLIENT, file_over(1), 0, 1)
    with pytest.raises(UsageError, match="lacks storage node 2 of chain 2"):
        FileTransfers(routing, {1: 1}).writes(CLIENT, file_over(2), 0, 1)
    with pytest.raises(UsageError, match="give at most"):
        FileTransfers(routing, {1: 1}).reads(CLIENT, file_over(2), 0, 1 << 60)
