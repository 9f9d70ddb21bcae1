"""`ff host new-file`: what a cluster file has of a file of `ff up`, and what it says of the rest."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.cli.hosts.command import command
from fireflyer.cli.hosts.config import ClusterFile, read_cluster_file
from fireflyer.cli.hosts.from_up import NewFile, NewHost, cluster_file, parse_host
from fireflyer.cli.hosts.processes import platform_config, processes_of
from fireflyer.cli.main import ff
from fireflyer.cli.platform.up import read_up_file
from fireflyer.cluster.local.config import DEFAULTS, HealthWish, StorageWish, UpConfig
from fireflyer.cluster.local.layout import PlatformLayout, new_platform
from fireflyer.cluster.manager.config import PlatformConfig

HOSTS = (NewHost("alpha", "10.0.0.1"), NewHost("beta", "fd00::2"), NewHost("gamma"))
SETTINGS = """
agents = 4
zones = 2
directory = "mine"
listen = "127.0.0.1:9500"
listen_agents = "127.0.0.1:9501"
metrics_listen = "127.0.0.1:9464"
objects = "s3://bucket/fireflyer"
history = "none"
logs_of_run_mib = 2
logs_keep_days = 3
run_logs_mib = 4
stop_after = "10m"
[[nodes]]
names = ["agent-1", "agent-4"]
group = "debug"
zone = "west"
labels = ["fast", "big"]
[time_sharing]
guarantee = "30m"
cross_zone_nodes = 8
[storage]
nodes = 2
replicas = 1
targets_per_node = 3
durable = false
store = "postgresql://me@db/files"
[health]
enabled = true
period = "1m"
groups = ["debug"]
[history_keep]
parts_days = 7
"""
SAME = ("metrics_listen", "objects", "history", "history_keep", "logs_of_run_mib", "logs_keep_days", "stop_after_ms")


def written(up: UpConfig, hosts: tuple[NewHost, ...] = HOSTS, managers: int = 2) -> NewFile:
    return cluster_file(up, hosts, managers=managers, cluster="5f" * 16)


def of_up(tmp_path: Path, text: str = SETTINGS) -> UpConfig:
    path = tmp_path / "up.toml"
    path.write_text(text)
    return read_up_file(str(path))


def read(tmp_path: Path, made: NewFile) -> ClusterFile:
    path = tmp_path / "cluster.toml"
    path.write_text(made.text)
    return read_cluster_file(str(path))


def test_managers_of_the_cluster_have_the_settings_that_the_manager_of_ff_up_has(tmp_path: Path) -> None:
    up = of_up(tmp_path)
    layout = PlatformLayout(str(tmp_path / "platform"))
    layout.make_directory()
    here, _ = layout.write_manager(new_platform(4, 1, 0), up, "127.0.0.1:0", "127.0.0.1:0")
    cluster = read(tmp_path, written(up))
    for host in cluster.managers:
        there = platform_config(cluster, host)
        for name in (*SAME, "health"):
            assert getattr(there, name) == getattr(here, name) != getattr(untouched(), name), name
    assert (cluster.ports.platform, cluster.ports.agents) == (9500, 9501)
    assert cluster.agent.run_logs_mib == 4
    assert cluster.storage == {"durable": False}
    assert cluster.store == "postgresql://me@db/files"


def untouched() -> PlatformConfig:
    return PlatformConfig(name="m", cluster="c", store="s", directory="d", secret_file="f")


def test_hosts_are_those_that_were_named_with_managers_first_and_as_many_storage_nodes_as_the_file_says(
    tmp_path: Path,
) -> None:
    cluster = read(tmp_path, written(of_up(tmp_path)))
    assert [(one.name, one.address) for one in cluster.hosts] == list(HOSTS)
    assert [one.manager for one in cluster.hosts] == [True, True, False]
    assert [one.node for one in cluster.hosts] == [1, 2, 0]
    assert list(cluster.hosts[1].target_directories) == [2001, 2002, 2003]
    assert cluster.target == "ff://10.0.0.1:7000,[fd00::2]:7000"


def test_without_a_file_each_host_has_an_agent_and_storage_and_two_have_managers(tmp_path: Path) -> None:
    made = written(UpConfig())
    assert made.left_out == ()
    assert made.to_decide == made.text.count("# DECIDE") == 2 + len(HOSTS)
    cluster = read(tmp_path, made)
    assert [len(processes_of(cluster, host)) for host in cluster.hosts] == [4, 4, 2]
    assert "ff fs admin add-chains --replicas 2" in made.text
    assert made == written(of_up(tmp_path, DEFAULTS)), "the printed defaults say nothing"


def test_what_stores_keep_is_written_as_commands_that_the_parser_takes(tmp_path: Path) -> None:
    commands = re.findall(r"^#   ff (.*)$", written(of_up(tmp_path)).text, re.MULTILINE)
    assert commands == [
        "fs admin add-chains --replicas 1",
        "time-sharing --guarantee 30m --cross-zone-nodes 8",
        "node move alpha --zone west --group debug",
        "node label alpha fast big",
    ]
    for one in commands:
        assert taken(one.split()), one


def taken(words: list[str]) -> bool:
    """Whether the parser takes it; nothing is run."""
    found: click.Command = ff
    context = ff.make_context("ff", list(words))
    rest = words
    while isinstance(found, click.Group) and (inner := found.get_command(context, rest[0])) is not None:
        found, rest = inner, rest[1:]
    found.make_context(words[0], list(rest))
    return True


def test_every_setting_is_carried_or_named_as_left_out(tmp_path: Path) -> None:
    """A key that is added to the file of `ff up` must be decided on here."""
    up, plain = of_up(tmp_path), written(UpConfig())
    for key in UpConfig.__struct_fields__:
        assert getattr(up, key) != getattr(UpConfig(), key), f"{key} is not in SETTINGS"
        alone = written(msgspec.structs.replace(UpConfig(), **{key: getattr(up, key)}))
        assert alone != plain, key
    for key in StorageWish.__struct_fields__:
        alone = written(UpConfig(storage=StorageWish(**{key: getattr(up.storage, key)})))
        assert alone != plain, key


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"agents": 8}, "agents = 8: each host has one agent"),
        ({"zones": 2}, "zones = 2"),
        ({"directory": "/x/mine"}, "directory = '/x/mine'"),
        ({"storage": StorageWish(nodes=5)}, "storage.nodes = 5: each of the 3 hosts"),
        ({"storage": StorageWish(store="postgresql://db/f?table=t")}, "storage.store: it names a table"),
        ({"history": "sqlite:////h"}, "history = 'sqlite:////h'"),
        ({"metrics_listen": "10.1.2.3:9464"}, "metrics_listen = '10.1.2.3:9464'"),
        ({"health": HealthWish(period="1m")}, "[health]: it is not enabled"),
    ],
)
def test_a_setting_that_only_one_machine_can_have_is_said_in_one_line(setting: dict[str, Any], said: str) -> None:
    made = written(UpConfig(**setting))
    (line,) = made.left_out
    assert line.startswith(said)
    assert "\n" not in line


def test_nodes_beyond_the_hosts_are_named(tmp_path: Path) -> None:
    assert "nodes.names has agent-4: there are 3 hosts" in written(of_up(tmp_path)).left_out


def test_a_directory_for_blobs_is_to_be_decided_on_as_all_managers_must_see_it(tmp_path: Path) -> None:
    made = written(of_up(tmp_path, 'objects = "blobs"'))
    assert f'objects = "{tmp_path}/blobs"  # DECIDE' in made.text


def test_thresholds_of_health_have_to_be_on_each_host(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text("")
    made = written(of_up(tmp_path, '[health]\nenabled = true\npolicy = "policy.toml"'))
    assert f"copy {tmp_path}/policy.toml to it" in made.text
    cluster = read(tmp_path, made)
    assert platform_config(cluster, cluster.hosts[0]).health.program[1:] == ("--policy", f"{tmp_path}/policy.toml")


def test_groups_keep_their_own_thresholds_and_validation(tmp_path: Path) -> None:
    for name in ("policy.toml", "gpu.toml"):
        (tmp_path / name).write_text("")
    table = 'policy = "policy.toml"\nvalidation = ["fireflyer:validate"]\n[health.group_policies]\ngpu = "gpu.toml"'
    made = written(of_up(tmp_path, f"[health]\nenabled = true\n{table}"))
    assert all(f"copy {tmp_path}/{name} to it" in made.text for name in ("policy.toml", "gpu.toml"))
    cluster = read(tmp_path, made)
    health = platform_config(cluster, cluster.hosts[0]).health
    assert health.validation == ("fireflyer:validate",)
    assert health.by_group["gpu"].program == ("fireflyer:health", "--policy", f"{tmp_path}/gpu.toml")


def test_two_hosts_have_two_addresses() -> None:
    with pytest.raises(UsageError, match="two hosts have the address"):
        written(UpConfig(), (NewHost("a", "10.0.0.1"), NewHost("b", "10.0.0.1")))


def test_there_are_no_more_replicas_than_storage_nodes() -> None:
    up = UpConfig(storage=StorageWish(replicas=3))
    assert "add-chains --replicas 2" in written(up, (NewHost("a"), NewHost("b"))).text


@pytest.mark.parametrize(
    ("hosts", "managers", "why"),
    [
        (("a", "a"), 1, "both have name a"),
        (("a",), 2, "2 managers on 1 hosts; 1 to 1 are possible"),
        (("-a",), 1, "is no name"),
    ],
)
def test_hosts_of_which_there_is_no_cluster_are_refused_in_one_line(
    hosts: tuple[str, ...], managers: int, why: str
) -> None:
    with pytest.raises(UsageError) as refused:
        written(UpConfig(), tuple(map(NewHost, hosts)), managers)
    assert why in str(refused.value)
    assert "$" not in str(refused.value)


def test_an_address_has_no_port() -> None:
    assert parse_host("a") == NewHost("a")
    assert parse_host("a=n1.example.com") == NewHost("a", "n1.example.com")
    assert parse_host("a=[fd00::1]") == parse_host("a=fd00::1") == NewHost("a", "fd00::1")
    for wrong in ("a=", "a=10.0.0.1:7000", "a=b c", 'a="'):
        with pytest.raises(UsageError, match="without a port"):
            parse_host(wrong)


def test_the_command_writes_a_file_that_show_takes_and_never_overwrites_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("up.toml").write_text(SETTINGS)
    words = ["new-file", "--from", "up.toml", "cluster.toml", "alpha=10.0.0.1", "beta=10.0.0.2"]
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    assert "Not in cluster.toml:\n" in done.stdout
    assert "  agents = 4: each host has one agent, and is one node\n" in done.stdout
    before = Path("cluster.toml").read_bytes()
    shown = CliRunner().invoke(command, ["show", "--name", "beta", "cluster.toml"], catch_exceptions=False)
    assert "storage           ff fs storage" in shown.stdout
    with pytest.raises(FireflyerError, match="exists already"):
        CliRunner().invoke(command, words, catch_exceptions=False)
    assert Path("cluster.toml").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.toml", "up.toml"]
