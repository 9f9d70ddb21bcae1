"""The cluster file: what is refused, and the processes of a host that follow from it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fireflyer.base.errors import NotFound, UsageError
from fireflyer.cli.hosts.config import ClusterFile, read_cluster_file
from fireflyer.cli.hosts.processes import HostProcess, platform_config, processes_of
from fireflyer.cli.hosts.run import HostDirectory
from fireflyer.fs.service.storage import target_directory

CLUSTER = "5f" * 16
FILE = f"""
cluster = "{CLUSTER}"
store = "postgresql://fireflyer@db/fireflyer?sslmode=require"
objects = "/shared/fireflyer"

[[hosts]]
name = "a"
manager = true
node = 1
targets = {{ 1001 = "/disk1/fireflyer", 1002 = "/disk2/fireflyer" }}

[[hosts]]
name = "b"
address = "fd00::2"
manager = true

[[hosts]]
name = "c"
meta = true
agent = false
"""


def read(tmp_path: Path, text: str = FILE) -> ClusterFile:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return read_cluster_file(str(path))


def config_of(cluster: ClusterFile, host: str, process: str) -> dict[str, Any]:
    (found,) = (one for one in processes_of(cluster, cluster.host(host)) if one.name == process)
    assert found.arguments[-1] == found.config_file == f"/var/lib/fireflyer/{process}/config.toml"
    return tomllib.loads(found.config)


def names(cluster: ClusterFile, host: str) -> list[str]:
    return [one.name for one in processes_of(cluster, cluster.host(host))]


def test_each_host_runs_what_it_has(tmp_path: Path) -> None:
    cluster = read(tmp_path)
    assert names(cluster, "a") == ["platform-manager", "files-manager", "storage", "agent"]
    assert names(cluster, "b") == ["platform-manager", "files-manager", "agent"]
    assert names(cluster, "c") == ["meta"]


def test_processes_find_each_other(tmp_path: Path) -> None:
    cluster = read(tmp_path)
    storage, files = config_of(cluster, "a", "storage"), config_of(cluster, "b", "files-manager")
    assert storage["managers"] == config_of(cluster, "c", "meta")["managers"] == ["a:7000", "[fd00::2]:7000"]
    assert (files["listen"], files["advertise"]) == ("[::]:7000", "[fd00::2]:7000")
    assert (storage["host"], storage["port"], storage["advertise"]) == ("0.0.0.0", 7100, "a")
    assert storage["targets"] == [
        {"id": 1001, "directory": "/disk1/fireflyer", "capacity_bytes": 0},
        {"id": 1002, "directory": "/disk2/fireflyer", "capacity_bytes": 0},
    ]
    assert files["accounts"] == ["a:9442", "[fd00::2]:9442"]
    platform = platform_config(cluster, cluster.host("b"))
    assert (platform.advertise, platform.managers) == ("https://[fd00::2]:9440", ("a:9441", "[fd00::2]:9441"))
    assert (platform.listen_accounts, platform.accounts_secret_file) == ("[::]:9442", files["secret_file"])
    agent = processes_of(cluster, cluster.host("b"))[-1]
    assert agent.environment == (("FIREFLYER_FS", "ff://a:7000,[fd00::2]:7000"),)


def test_managers_of_both_kinds_keep_tables_of_their_own_in_one_database(tmp_path: Path) -> None:
    cluster = read(tmp_path)
    stores = {config_of(cluster, "a", name)["store"] for name in ("platform-manager", "files-manager")}
    assert stores == {
        f"postgresql://fireflyer@db/fireflyer?sslmode=require&table=fireflyer_{kind}" for kind in ("platform", "files")
    }
    assert config_of(cluster, "c", "meta")["store"] in stores


def test_settings_reach_the_processes_and_meta_services_have_those_of_managers(tmp_path: Path) -> None:
    more = "[platform]\nsettle_ms = 1000\n[manager]\nfailure_timeout_ms = 3000\n[manager.files]\nstripe = 4\n"
    cluster = read(tmp_path, FILE + more + "[storage]\nio_threads = 2\n[agent]\nown_user = true\n")
    assert config_of(cluster, "a", "platform-manager")["settle_ms"] == 1000
    manager, meta = config_of(cluster, "a", "files-manager"), config_of(cluster, "c", "meta")
    assert manager["failure_timeout_ms"] == 3000
    assert manager["files"] == meta["files"]
    assert (meta["files"]["stripe"], meta["files"]["trusted_root"]) == (4, True)
    assert config_of(cluster, "a", "storage")["io_threads"] == 2
    assert not cluster.root_disk
    assert read(tmp_path, FILE + "[storage]\nroot_disk = true\n").root_disk
    assert "--own-user" in processes_of(cluster, cluster.host("a"))[-1].arguments


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        (f'"{CLUSTER}"', '"lab"', "openssl rand -hex 16"),
        ("postgresql://fireflyer@db", "embedded:/var", "store is not the URL of a PostgreSQL database"),
        ("sslmode=require", "table=mine", "store names a table"),
        ('objects = "/shared/fireflyer"', "", "objects is missing"),
        ("manager = true", "manager = false", "no host has a manager"),
        ("node = 1", "", "node and targets belong together"),
        ("1002 =", "one =", "target 'one' is no id"),
        ('"/disk2/fireflyer"', '"disk2"', "not an absolute path"),
        ('"/disk2/fireflyer"', '"/disk1/fireflyer"', "two targets have one directory"),
        ('name = "c"', 'name = "a"', "both have name a"),
        ("meta = true\n", 'meta = true\nnode = 1\ntargets = { 7 = "/d" }\n', "both have node 1"),
        ("meta = true\n", "meta = true\nmanager = true\n", "leave meta out"),
        ("meta = true\n", "", "host c runs nothing"),
        ("meta = true\n", "metta = true\n", "unknown field `metta`"),
    ],
)
def test_what_contradicts_itself_is_refused_in_one_line(tmp_path: Path, before: str, after: str, why: str) -> None:
    assert before in FILE
    with pytest.raises(UsageError) as refused:
        read(tmp_path, FILE.replace(before, after))
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ('[platform]\nname = "x"\n', "[platform] has name, which follows"),
        ("[storage]\nio_threads = 0\n", "[storage] of the cluster file"),
        ("[manager]\nserve_flies = true\n", "unknown field `serve_flies`"),
        ("[manager]\nfiles = 3\n", "[manager] of the cluster file"),
    ],
)
def test_settings_that_a_process_would_refuse_are_refused_before_it_is_started(
    tmp_path: Path, more: str, why: str
) -> None:
    cluster = read(tmp_path, FILE + more)
    with pytest.raises(UsageError) as refused:
        processes_of(cluster, cluster.host("a"))
    assert why in str(refused.value)


def test_ports_differ(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ports.agents and ports.platform are both 9440"):
        read(tmp_path, FILE + "[ports]\nagents = 9440\n")
    assert read(tmp_path, FILE + "[ports]\nfiles = 17000\n").target == "ff://a:17000,[fd00::2]:17000"


def test_a_host_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no host 'd' \(it has a, b, c\)"):
        read(tmp_path).host("d")
    cluster = read(tmp_path)
    with pytest.raises(UsageError, match=r"host c has no manager of the platform; do it on one that has \(a, b\)"):
        platform_config(cluster, cluster.host("c"))


def test_a_target_is_made_anew_only_where_nothing_is_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk1"
    text = FILE.replace("/disk1", str(disk)) + "[storage]\nroot_disk = true\n"
    cluster = read(tmp_path, text)
    host, there = cluster.host("a"), HostDirectory(str(tmp_path / "var"))
    assert there.made() == {}
    monkeypatch.setattr(target_directory, "_ROOT", str(tmp_path))
    with pytest.raises(UsageError, match="mount its disk first"):
        there.make_again(read(tmp_path, text.replace("root_disk = true", "root_disk = false")), host, 1001)
    for time in (1, 2):
        assert there.make_again(cluster, host, 1001) == f"{disk}/fireflyer"
        assert there.made() == {1001: time}
        with pytest.raises(UsageError, match=r"is not empty, so target 1001 is not made anew there; mount the new"):
            there.make_again(cluster, host, 1001)
        for left in (disk / "fireflyer").iterdir():
            left.unlink()
    with pytest.raises(UsageError, match=r"host a has no target 9 \(it has 1001, 1002\)"):
        there.make_again(cluster, host, 9)


def test_a_process_is_the_same_as_long_as_nothing_of_it_changes(tmp_path: Path) -> None:
    def of(text: str) -> dict[str, HostProcess]:
        cluster = read(tmp_path, text)
        return {one.name: one for one in processes_of(cluster, cluster.host("a"))}

    before, after = of(FILE), of(FILE.replace("/disk2", "/disk3"))
    assert {name for name, process in before.items() if after[name] != process} == {"storage"}
    assert msgspec.json.encode(before) == msgspec.json.encode(of(FILE))
