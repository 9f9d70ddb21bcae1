"""A rank learns where it stands from the variables that torchrun sets, and from ours beside them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.base.launch import TRANSPORTS, RankEnvironment, misspelt_settings
from fireflyer.base.port_range import PortRange


@given(nodes=st.integers(1, 5), per_node=st.integers(1, 8), data=st.data())
def test_what_the_launcher_writes_the_rank_reads(nodes: int, per_node: int, data: st.DataObject) -> None:
    node, local = data.draw(st.integers(0, nodes - 1)), data.draw(st.integers(0, per_node - 1))
    env = RankEnvironment(
        rank=node * per_node + local,
        world_size=nodes * per_node,
        local_rank=local,
        local_world_size=per_node,
        node=node,
        nodes=nodes,
        master_port=4242,
        attempt=data.draw(st.integers(0, 9)),
        max_restarts=9,
        job="j",
        control=data.draw(st.none() | st.just("127.0.0.1:1")),
        peer_memory=data.draw(st.booleans()),
        transport=data.draw(st.none() | st.sampled_from(TRANSPORTS)),
        dumps=data.draw(st.none() | st.just("/dumps")),
        address=data.draw(st.none() | st.just("fd00::1")),
        ports=data.draw(st.none() | st.just(PortRange(29500, 29599))),
    )
    assert RankEnvironment.from_mapping(env.to_mapping()) == env


def test_a_process_started_by_hand_is_rank_0_of_1() -> None:
    env = RankEnvironment.from_mapping({})
    assert (env.rank, env.world_size, env.node, env.nodes, env.control) == (0, 1, 0, 1, None)


def test_plain_torchrun_gives_the_number_of_nodes_by_division() -> None:
    env = RankEnvironment.from_mapping({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})
    assert env.nodes == 2


def test_a_variable_that_is_not_a_number_is_named() -> None:
    with pytest.raises(UsageError, match="RANK='two' is not an integer"):
        RankEnvironment.from_mapping({"RANK": "two"})


def test_a_transport_that_is_not_known_is_named() -> None:
    with pytest.raises(UsageError, match="FF_TRANSPORT='rdma' is not known; use one of tcp, ucx, auto"):
        RankEnvironment.from_mapping({"FF_TRANSPORT": "rdma"})


def test_a_port_range_that_is_none_is_named() -> None:
    with pytest.raises(UsageError, match="FF_PORT_RANGE: port range '29500' is not understood; write"):
        RankEnvironment.from_mapping({"FF_PORT_RANGE": "29500"})
    assert RankEnvironment.from_mapping({"FF_PORT_RANGE": "", "FF_ADDRESS": ""}).ports is None


def test_dumps_go_where_the_user_says_or_into_the_directory_of_the_run() -> None:
    assert RankEnvironment.from_mapping({}).dump_dir is None
    assert RankEnvironment.from_mapping({"FF_RUN_DIR": "/run"}).dump_dir == "/run/flight"
    assert RankEnvironment.from_mapping({"FF_RUN_DIR": "/run", "FF_DUMP_DIR": "/d"}).dump_dir == "/d"


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(UsageError, match="rank 4 of 4"):
        RankEnvironment.from_mapping({"RANK": "4", "WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("FF_TRANSPROT", "FF_TRANSPORT"),
        ("FF_PEERMEMORY", "FF_PEER_MEMORY"),
        ("FF_DUMPS_DIR", "FF_DUMP_DIR"),
        ("FF_TRANSPORT", None),
        ("FF_SECRET_FILE", None),
        ("FF_OF_SOMEBODY_ELSE", None),
        ("FFMPEG_TUNE", None),
    ],
)
def test_a_misspelt_setting_is_noticed_and_names_of_others_are_not(name: str, meant: str | None) -> None:
    assert misspelt_settings(["PATH", name]) == ([] if meant is None else [(name, meant)])


def test_every_setting_of_a_rank_is_known() -> None:
    full = RankEnvironment(
        control="h:1", secret_file="s", run_dir="r", tune=True, pin=False, peer_memory=False, transport="tcp", dumps="d"
    )
    assert misspelt_settings(full.to_mapping()) == []
