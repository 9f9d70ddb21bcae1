"""The TOML file of `ff up`: what it says without a word, and what it says of a wrong one."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from fireflyer.base.units import SECOND
from fireflyer.cli import main
from fireflyer.cluster.core.platform.store.retention import HistoryKeep
from fireflyer.cluster.core.scheduler.model import HOUR, Policy
from fireflyer.cluster.local.config import (
    DEFAULTS,
    HealthWish,
    NodesConfig,
    StorageWish,
    TimeSharing,
    UpConfig,
    keys_at,
)

Capture = pytest.CaptureFixture[str]


def test_what_is_printed_has_every_key_and_changes_nothing_as_it_is(capsys: Capture) -> None:
    assert main(["up", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert printed == DEFAULTS
    assert msgspec.toml.decode(printed.encode(), type=UpConfig) == UpConfig()
    uncommented = re.sub(r"^# (?=\[|\w+ = )", "", printed, flags=re.MULTILINE)
    found = tomllib.loads(uncommented)
    tables = (
        (found["time_sharing"], TimeSharing),
        (found["storage"], StorageWish),
        (found["health"], HealthWish),
        (found["history_keep"], HistoryKeep),
    )
    for table, kind in ((found, UpConfig), (found["nodes"][0], NodesConfig), *tables):
        assert tuple(table) == kind.__struct_fields__
    wanted = msgspec.toml.decode(uncommented.encode(), type=UpConfig)
    plain = UpConfig(agents=4, zones=1, nodes=wanted.nodes, time_sharing=wanted.time_sharing, storage=wanted.storage)
    assert wanted == plain
    assert wanted.storage == StorageWish(nodes=3, replicas=2, targets_per_node=4, durable=True, store="")
    assert wanted.nodes == (NodesConfig(names=("agent-1", "agent-2")),)
    assert wanted.time_sharing.changed(Policy(), 0) == (Policy(), 0)


def test_only_what_is_given_of_time_sharing_changes() -> None:
    sharing = TimeSharing(guarantee="1m", usage_margin=2.5)
    before = Policy(age_step_ns=HOUR)
    assert sharing.changed(before, 7) == (msgspec.structs.replace(before, usage_margin=2.5), 60 * SECOND)
    assert TimeSharing().changed(before, 7) == (before, 7)


def test_one_setting_has_the_nodes_checked() -> None:
    assert UpConfig().health.of_managers().order() is None
    order = HealthWish(enabled=True).of_managers().order()
    assert order is not None
    assert (order.program, order.follow, order.period_ns) == (
        ("fireflyer:health",),
        ("fireflyer:health",),
        300 * SECOND,
    )
    some = HealthWish(enabled=True, policy="/p.toml", period="90s", groups=("gpu",)).of_managers()
    assert (some.program, some.period_ms, some.groups) == (
        ("fireflyer:health", "--policy", "/p.toml"),
        90_000,
        ("gpu",),
    )


@pytest.mark.parametrize(
    ("policy", "said"), [(None, "is not a file"), ("[mounts]\nenable = true\n", "unknown field `enable`")]
)
def test_a_policy_of_checks_that_is_wrong_is_told_before_anything_is_started(
    tmp_path: Path, capsys: Capture, policy: str | None, said: str
) -> None:
    (tmp_path / "up.toml").write_text('[health]\nenabled = true\npolicy = "health.toml"\n')
    if policy is not None:
        (tmp_path / "health.toml").write_text(policy)
    assert main(["up", str(tmp_path / "up.toml")]) == 2
    shown = capsys.readouterr().err
    assert "health.toml" in shown
    assert said in shown
    assert shown.count("\n") == 1


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    found = UpConfig(directory="p", objects="blobs").beside(str(tmp_path / "x" / "up.toml"))
    assert (found.directory, found.objects) == (str(tmp_path / "x" / "p"), str(tmp_path / "x" / "blobs"))
    assert UpConfig(objects="s3://bucket/x").beside("/a/b").objects == "s3://bucket/x"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("agent = 2", f"line 1: unknown field `agent`; keys there are {keys_at('$')}"),
        ('agents = "2"', "line 1: agents: expected `int`, got `str`"),
        ("agents = 257", "line 1: agents: expected `int` <= 256"),
        ('[time_sharing]\nguarantee = "soon"', "guarantee: duration 'soon' is not understood; write it like 500ms"),
        ('[time_sharing]\nage_step = "1ms"', "age_step is '1ms'; 1s to 36500d are allowed"),
        ("[time_sharing]\nage = 1", f"line 2: time_sharing: unknown field `age`; keys there "
            f"are {keys_at('$.time_sharing')}"),
        ('[[nodes]]\nname = "agent-1"', f"nodes[0]: unknown field `name`; keys there are {keys_at('$.nodes')}"),
        ('agents = 2\n[[nodes]]\nnames = ["agent-3"]', "has 'agent-3'; names of nodes are agent-1 to agent-2"),
        ('[[nodes]]\nnames = ["gpu"]', "nodes.names has 'gpu'; names of nodes are agent-1 to agent-256"),
        ('[[nodes]]\nnames = ["agent-1", "agent-1"]', "nodes.names has agent-1 twice"),
        ('[[nodes]]\nnames = ["agent-1"]\ngroup = "a b"', "nodes.group has 'a b', which is no name"),
        ('listen = "here"', "listen: address 'here' is not understood; write it like 10.0.0.1:7000"),
        ('stop_after = "2d"', "stop_after is '2d'; 1s to 24h are allowed"),
        ("[storage]\nnode = 1", f"storage: unknown field `node`; keys there are {keys_at('$.storage')}"),
        ("[storage]\nnodes = -1", "storage.nodes: expected `int` >= 0"),
        ("[health]\nenable = true", f"health: unknown field `enable`; keys there are {keys_at('$.health')}"),
        ('[health]\nenabled = "yes"', "health.enabled: expected `bool`, got `str`"),
        ('[health]\nperiod = "0s"', "health.period is '0s'; 1s to 24h are allowed"),
        ('[health]\ngroups = ["a b"]', "health.groups has 'a b', which is no name"),
        ("a b", "Expected '=' after a key"),
    ],
)  # fmt: skip
def test_a_wrong_file_gets_one_line_and_makes_nothing(tmp_path: Path, capsys: Capture, text: str, said: str) -> None:
    file = tmp_path / "up.toml"
    file.write_text(text)
    assert main(["up", str(file)]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: FILE '{file}'")
    assert said in shown
    assert shown.count("\n") == 1
    assert [one.name for one in tmp_path.iterdir()] == ["up.toml"]


def test_a_file_that_is_not_there_is_said_to_be_written_first(tmp_path: Path, capsys: Capture) -> None:
    assert main(["up", str(tmp_path / "none.toml")]) == 2
    assert "is not a file; write one: ff up --print-config > FILE" in capsys.readouterr().err
