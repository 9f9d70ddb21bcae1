"""Who decides what carries data between nodes, and what is said where UCX cannot."""

from __future__ import annotations

import os
import socket
import struct
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.collectives.thread_ranks import together
from torch.distributed import HashStore  # type: ignore[attr-defined] # the stub lists what is public by other means

from fireflyer.base.errors import Unreachable, UsageError
from fireflyer.base.launch import RankEnvironment
from fireflyer.base.port_range import PortRange
from fireflyer.collectives import Communicator, make_plan, torch_join
from fireflyer.collectives.bootstrap.transports import Choice, Offer, choose, exchange_worker_addresses, make_offer
from fireflyer.collectives.flight import decode_dump, find_dumps
from fireflyer.native import Fabric, ucx_module
from fireflyer.runtime.store import LocalStore

needs_ucx = pytest.mark.skipif(not os.path.exists(ucx_module()), reason="this build has no UCX (Debian: libucx-dev)")
READY, RDMA = Offer("ucx"), Offer("auto", None, rdma=True)


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")


def test_tcp_is_what_nobody_needs_to_ask_for() -> None:
    assert make_offer("tcp") == (Offer(), None)
    assert choose([Offer(), Offer()]) == Choice("tcp", "default")


def test_ucx_is_used_where_all_ranks_can_and_one_that_cannot_is_named() -> None:
    assert choose([READY, READY]).transport == "ucx"
    with pytest.raises(UsageError, match=r"rank 1 cannot use transport 'ucx': no library; or use 'tcp'"):
        choose([READY, Offer("ucx", "no library")])


def test_ranks_that_ask_for_different_transports_are_told() -> None:
    with pytest.raises(UsageError, match=r"rank 2 asks for transport 'tcp', rank 0 for 'ucx'"):
        choose([READY, READY, Offer()])


def test_auto_takes_ucx_only_where_every_machine_has_an_rdma_device() -> None:
    assert choose([RDMA, RDMA]).transport == "ucx"
    assert choose([RDMA, Offer("auto")]) == Choice("tcp", "the machine of rank 1 has no RDMA device")
    assert choose([Offer("auto", "no library"), RDMA]) == Choice("tcp", "rank 0 cannot use UCX: no library")


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(UsageError, match="transport 'rdma' is not known; use one of tcp, ucx, auto"):
        make_offer("rdma")


def test_a_build_without_ucx_says_what_is_missing(tmp_path: Path) -> None:
    offer, fabric = make_offer("ucx", module_path=str(tmp_path / "_ucx.so"))
    assert fabric is None
    assert offer.problem is not None
    assert "libucx-dev" in offer.problem


def test_a_module_that_does_not_load_is_a_problem_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCX_ERROR_SIGNALS", "UCX_LOG_LEVEL"):
        monkeypatch.setenv(name, "fatal")
    module = tmp_path / "_ucx.so"
    module.write_bytes(b"not a library")
    offer, fabric = make_offer("auto", module_path=str(module))
    assert fabric is None
    assert offer.problem is not None
    assert str(module) in offer.problem
    assert "\n" not in offer.problem


@pytest.mark.parametrize(("own", "used"), [("", "29500-29599"), ("7000-7099", "7000-7099")])
def test_ucx_is_told_the_range_of_ports_unless_the_user_has_told_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, used: str
) -> None:
    monkeypatch.setattr(os, "environ", {"UCX_TCP_PORT_RANGE": own} if own else {})
    module = tmp_path / "_ucx.so"
    module.write_bytes(b"not a library")
    make_offer("auto", ports=PortRange(29500, 29599), module_path=str(module))
    assert os.environ["UCX_TCP_PORT_RANGE"] == used


@needs_ucx
def test_a_transport_that_ucx_does_not_have_is_a_problem_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "carrier_pigeons")
    monkeypatch.setenv("UCX_LOG_LEVEL", "fatal")
    offer, _ = make_offer("ucx")
    assert offer.problem is not None
    assert "UCX_TLS" in offer.problem
    errors = together([0, 1], lambda comm: comm.barrier(), transport="ucx")
    assert all(isinstance(error, UsageError) and "cannot use transport 'ucx'" in str(error) for error in errors)


@needs_ucx
def test_rdma_devices_are_looked_for(tmp_path: Path, over_tcp: None) -> None:
    assert not make_offer("auto", devices=str(tmp_path / "none")).offer.rdma
    (tmp_path / "mlx5_0").mkdir()
    assert make_offer("auto", devices=str(tmp_path)).offer.rdma


def answered(reply: bytes) -> str:
    """What `exchange_worker_addresses` says to a neighbour that answers with `reply`."""
    fabric = Fabric(ucx_module())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(reply)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(Unreachable) as caught:
            exchange_worker_addresses(fabric, {1: ("rank 1", ours)})
    return str(caught.value)


@needs_ucx
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"address":"","key":""}',
        b'{"address":"!","key":"00"}',
        b'{"address":"QUFB","key":"0011"}',
        b'{"address":"' + b"QUFB" * 8000 + b'","key":"' + b"00" * 16 + b'"}',
    ],
)
def test_a_neighbour_that_introduces_itself_with_garbage_is_named(body: bytes, over_tcp: None) -> None:
    assert "rank 1" in answered(struct.pack("<I", len(body)) + body)


@needs_ucx
def test_an_introduction_is_bounded_and_may_break_off(over_tcp: None) -> None:
    assert "more than" in answered(struct.pack("<I", 1 << 30))
    assert "the peer closed the connection" in answered(b"\0")


@needs_ucx
@pytest.mark.parametrize(
    ("tls", "nodes", "chunk_bytes"), [("tcp", [0, 1, 2], 65536), ("shm", [0, 0, 1], 65536), ("shm", [0, 1], 4096)]
)
def test_sums_over_ucx_have_the_bits_of_sums_over_tcp(
    tls: str, nodes: list[int], chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    plan = make_plan(nodes, chunk_bytes=chunk_bytes)

    def body(comm: Communicator) -> tuple[str, bytes]:
        arrays = [np.random.default_rng([comm.rank, n]).standard_normal(n).astype("f4") for n in (1, 1000, 300_001)]
        for array in arrays:
            comm.allreduce(array)
        gathered = np.empty(comm.world_size * 1000, "f4")
        comm.allgather(gathered, arrays[1])
        return comm.transport, b"".join(array.tobytes() for array in (*arrays, gathered))

    over_ucx = together(nodes, body, plan=plan, transport="ucx")
    over_sockets = together(nodes, body, plan=plan)
    assert {transport for transport, _ in over_ucx} == {"ucx"}
    assert {transport for transport, _ in over_sockets} == {"tcp"}
    assert {bits for _, bits in over_ucx} == {bits for _, bits in over_sockets}


@needs_ucx
def test_the_group_that_follows_keeps_the_transport(over_tcp: None) -> None:
    store = LocalStore()

    def body(comm: Communicator) -> tuple[str, float]:
        with comm.reform(store) as following:
            array = np.ones(100_000, "f4")
            following.allreduce(array)
            return following.transport, float(array[-1])

    assert together([0, 1], body, store=store, transport="ucx") == [("ucx", 2.0), ("ucx", 2.0)]


def asked_for(env: RankEnvironment, **options: Any) -> str:
    """What a group alone in the world uses, or the first words of the reason why it cannot."""
    try:
        with Communicator.from_environment(env, **options) as comm:
            return comm.transport
    except UsageError as error:
        return str(error)


def test_the_launcher_says_what_is_used_where_the_program_does_not() -> None:
    env = RankEnvironment(transport="ucx")
    assert asked_for(env) == "ucx" or "cannot use transport 'ucx'" in asked_for(env)
    assert asked_for(env, transport="tcp") == asked_for(RankEnvironment()) == "tcp"
    assert "transport '' is not known" in asked_for(env, transport="")


@pytest.mark.parametrize(
    ("options", "inherited", "variable", "expected"),
    [
        (None, None, None, "tcp"),
        (None, None, "auto", "auto"),
        (None, "tcp", "auto", "tcp"),
        ("auto", "tcp", "ucx", "auto"),
    ],
)
def test_a_group_of_torch_asks_for_what_its_options_its_world_or_the_launcher_say(
    options: str | None, inherited: str | None, variable: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("FF_TRANSPORT", variable)
    joined = torch_join.join(
        HashStore(),
        rank=0,
        world_size=1,
        name="alone",
        timeout=timedelta(seconds=30),
        options=torch_join.HfreduceOptions(transport=options),
        transport=inherited,
    )
    joined.communicator.close()
    assert (joined.transport, joined.communicator._config.transport) == (expected, expected)


def test_options_of_a_torch_group_refuse_an_unknown_transport() -> None:
    with pytest.raises(UsageError, match="transport 'rdma' is not known; use one of tcp, ucx, auto"):
        torch_join.HfreduceOptions(transport="rdma")


@needs_ucx
def test_a_dump_says_what_carried_the_data(tmp_path: Path, over_tcp: None) -> None:
    def body(comm: Communicator) -> None:
        comm.barrier()
        comm.dump()

    together([0, 1], body, transport="ucx", dump_dir=str(tmp_path))
    dumps = [decode_dump(Path(path).read_bytes(), name=path) for path in find_dumps([str(tmp_path)])]
    assert [dump.transport for dump in dumps] == ["ucx", "ucx"]


@needs_ucx
def test_a_child_of_a_fork_may_end_as_it_likes_and_the_group_goes_on(over_tcp: None) -> None:
    forked = threading.Event()

    def body(comm: Communicator) -> Any:
        array = np.ones(100_000, "f4")
        comm.allreduce(array)
        status = 0
        if comm.rank == 0:
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            _, status = os.waitpid(pid, 0)
            forked.set()
        assert forked.wait(30)
        comm.allreduce(array)
        return status, float(array[0])

    assert together([0, 1], body, transport="ucx") == [(0, 4.0), (0, 4.0)]
