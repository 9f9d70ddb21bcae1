"""`ff fs`: what a person gets who asks for what cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from fireflyer.base.toml_text import to_toml
from fireflyer.cli import main
from fireflyer.cli.fs.status import summary_of
from fireflyer.fs.schema.manager import Condition, NodeStatus, Status, TargetReport, TargetStatus
from fireflyer.fs.schema.routing import Chain, Member, TargetState
from fireflyer.fs.service.local.layout import Layout, LocalCluster, new_cluster, with_new_node, without_node
from fireflyer.fs.service.manager.config import ManagerConfig
from fireflyer.fs.service.storage.config import StorageConfig
from fireflyer.runtime.processes.run_lock import RunLock, seems_held


def made(directory: Path, **changes: object) -> LocalCluster:
    cluster = new_cluster(
        nodes=3, replicas=2, targets_per_node=4, managers=1, store="", durable=True, failure_timeout_ms=6000
    )
    layout = Layout(str(directory))
    layout.make_directory()
    layout.make_secret()
    layout.write_admin_token("fft1.0123.secret")
    layout.save(cluster)
    return cluster


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("status", "--dir", "{}/none"), 1, "{}/none holds no cluster; make one: ff fs up --dir {}/none"),
        (("status", "--dir", "{}/made"), 2, "the cluster in {}/made has never run; start it: ff fs up --dir {}/made"),
        (("down", "--dir", "{}/made"), 1, "the cluster in {}/made is not running"),
        (("admin", "add-node", "--dir", "{}/none"), 1, "{}/none holds no cluster; make one: ff fs up --dir {}/none"),
        (("status", "--manager", "a:1"), 2, "the managers at a:1 ask who you are; add --token-file FILE (token of a "),
        (
            ("status", "--manager", "a:1", "--token-file", "{}/none"),
            2,
            "--token-file '{}/none': there is no such file; an administrator makes a token with: ff fs admin user",
        ),
        (("ls", "--manager", "a:1", "--secret-file", "{}/none"), 2, "--secret-file '{}/none': there is no such file;"),
        (
            ("ls", "--manager", "a:1", "--secret-file", "x", "--token-file", "y"),
            2,
            "--token-file and --secret-file cannot be combined; give one of them",
        ),
        (
            ("status", "--token-file", "x"),
            2,
            "--token-file and --secret-file need the address of a manager; add --manager HOST:PORT",
        ),
        (
            ("status", "--manager", "a"),
            2,
            "Invalid value for '--manager': 'a' is not HOST:PORT; write it like node-1:7000",
        ),
        (("sync", "here", "there"), 2, "neither 'here' nor 'there' is in the cluster; a path there begins with ff://"),
        (("ls", "--dir", "{}/none", "/a", "/b"), 1, "{}/none holds no cluster; make one: ff fs up --dir {}/none"),
        (("down", "--dir", "{}/none"), 1, "{}/none holds no cluster; give the directory of `ff fs up` with --dir"),
        (
            ("ls", "--dir", "{}/ran", "data"),
            2,
            "'data' is not a path in the cluster: those begin with / or ff://, for ",
        ),
        (("ls", "--dir", "{}/ran", "/data"), 1, "the cluster in {}/ran is not running; start it: ff fs up --dir "),
        (("cp", "--dir", "{}/ran", "/a"), 2, "only one path is given ('/a'); give the source and the target"),
        (
            ("ls", "ff://host:x/data"),
            2,
            "'host:x' in 'ff://host:x/data' is not HOST:PORT; write ff://HOST:7000/path, or ff:///",
        ),
        (("status", "--manager", "a:1", "--dir", "x"), 2, "--dir and --manager cannot be combined; give one of them"),
        (("admin", "drain", "--dir", "{}/ran"), 2, "no target is named; give --target ID or --node ID"),
        (("status", "--dir", "{}/ran"), 1, "the cluster in {}/ran is not running; start it: ff fs up --dir "),
        (
            ("admin", "override", "--dir", "{}/ran", "--chain", "1", "--target", "2"),
            1,
            "the cluster in {}/ran is not",
        ),
        (("admin", "rebalance", "--dir", "{}/ran", "--cancel", "--plan"), 2, "--cancel cannot be combined with --plan"),
        (("up", "--dir", ""), 2, "--dir is empty; give the directory of the cluster"),
        (("up", "--dir", "{}/made", "--nodes", "4"), 2, "--nodes 4: {}/made holds a cluster with 3; leave the option"),
        (
            ("up", "--dir", "{}/made", "--failure-timeout", "2"),
            2,
            "--failure-timeout 2: {}/made holds a cluster with 6 s, which cannot be changed; leave the option out",
        ),
        (("up", "--dir", "{}/made", "--store", "x"), 2, "--store: {}/made holds a cluster that uses another store; "),
        (("up", "--dir", "{}/new", "--store", "mysql://x"), 2, "--store is not the URL of a PostgreSQL database; "),
        (("up", "--dir", "{}/full/mine"), 2, "{}/full/mine is not a directory; give a new one"),
        (("up", "--dir", "{}/full"), 2, "{}/full is not empty and holds no cluster (it has 'mine'); give "),
        (
            ("up", "--dir", "{}/new", "--failure-timeout", "0.001"),
            2,
            "--failure-timeout 0.001: give 0.1 to 3600 seconds",
        ),
        (("up", "--dir", "{}/new", "--managers", "2"), 2, "2 managers need a shared store; add --store"),
        (("up", "--dir", "{}/new", "--replicas", "4"), 2, "4 replicas need 4 nodes with room for targets"),
        (("manager", "{}/none.toml"), 2, "configuration '{}/none.toml' is not a file; give the TOML file that"),
        (("storage", "{}/full/mine"), 2, "configuration '{}/full/mine': "),
    ],
)
def test_what_cannot_be_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, message: str
) -> None:
    made(tmp_path / "made")
    ran = msgspec.structs.replace(made(tmp_path / "ran"), managers=("127.0.0.1:1",))
    Layout(str(tmp_path / "ran")).save(ran)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("no TOML")
    assert main(["fs", *(one.replace("{}", str(tmp_path)) for one in arguments)]) == code
    text = capsys.readouterr().err
    assert text.startswith(f"error: {message.replace('{}', str(tmp_path))}"), text
    assert text.count("\n") == 1


def test_who_runs_it_is_named_to_who_comes_second(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "made")
    with RunLock(Layout(str(tmp_path / "made")).lock_file):
        assert main(["fs", "up", "--dir", str(tmp_path / "made")]) == 1
    text = capsys.readouterr().err
    assert text.startswith("error: the cluster is running already (process ")
    assert text.endswith(f"stop it: ff fs down --dir {os.path.relpath(tmp_path / 'made')}\n")


def test_a_lock_is_in_place_until_its_directory_is_removed_moved_or_made_anew(tmp_path: Path) -> None:
    directory = tmp_path / "made"
    directory.mkdir()
    with RunLock(str(directory / "up.lock")) as lock:
        assert lock.in_place()
        directory.rename(tmp_path / "moved")
        assert not lock.in_place()
        directory.mkdir()
        (directory / "up.lock").touch()
        assert not lock.in_place()
        (directory / "up.lock").unlink()
        (tmp_path / "moved" / "up.lock").rename(directory / "up.lock")
        assert lock.in_place()


CONFIG = """cluster = "c"
node = 7
managers = ["a:1"]
secret_file = "s"

[[targets]]
id = 1
directory = "/a"  # id = "two"

[[targets]]
id = "two"
directory = "/b"
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (CONFIG, 11),
        (CONFIG.replace('"two"', "2").replace("node = 7", 'node = "x"'), 2),
        (CONFIG.replace('"two"', "2").replace("node = 7", "node = 7\nnodes = 8"), 3),
        (CONFIG.replace('"two"', "2").replace('["a:1"]', '["a:1", 2]'), 3),
        (CONFIG.replace('\nid = "two"\n', "\n"), 10),
        (CONFIG.replace('"two"', "2").replace('"/b"', '"/b'), 12),
    ],
)
def test_a_configuration_that_is_wrong_names_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, line: int
) -> None:
    path = tmp_path / "storage.toml"
    path.write_text(text)
    assert main(["fs", "storage", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"line {line}" in said, said
    assert said.startswith(f"error: configuration {str(path)!r}")
    assert said.count("\n") == 1


def test_a_lock_seems_held_while_its_holder_lives_and_looking_is_in_nobodys_way(tmp_path: Path) -> None:
    path = str(tmp_path / "up.lock")
    assert not seems_held(path)
    with RunLock(path):
        assert seems_held(path)
    ended = subprocess.Popen(
        [sys.executable, "-c", f"from fireflyer.runtime.processes.run_lock import RunLock\nRunLock({path!r})"]
    )
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert not seems_held(path), "a process that has ended holds nothing, even if nobody has waited for it"
    ended.wait()
    assert not seems_held(path)


def test_a_damaged_file_is_not_guessed_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "made")
    (tmp_path / "made" / "cluster.json").write_text('{"version": 1}')
    assert main(["fs", "status", "--dir", str(tmp_path / "made")]) == 1
    assert "cluster.json is damaged" in capsys.readouterr().err


def test_what_is_written_for_processes_is_what_they_read(tmp_path: Path) -> None:
    cluster = made(tmp_path / 'a "strange" name')
    layout = Layout(str(tmp_path / 'a "strange" name'))
    manager = msgspec.toml.decode(
        Path(layout.write_manager(cluster, 1, "127.0.0.1:7")).read_bytes(), type=ManagerConfig
    )
    assert (manager.cluster, manager.listen, manager.secret_file) == (
        cluster.cluster,
        "127.0.0.1:7",
        layout.secret_file,
    )
    text = Path(layout.write_storage(cluster, cluster.nodes[1])).read_bytes()
    storage = msgspec.toml.decode(text, type=StorageConfig)
    assert [one.id for one in storage.targets] == [2001, 2002, 2003, 2004]
    assert storage.targets[0].directory == layout.target_directory(2, 2001)
    assert to_toml({"a": "ü\n", "b": True, "c": [1, 2]}) == 'a = "ü\\n"\nb = true\nc = [1, 2]\n'


def test_every_target_of_a_new_cluster_is_in_one_chain_and_a_new_node_has_spare_ones(tmp_path: Path) -> None:
    cluster = made(tmp_path / "made")
    used = sorted(target for chain in cluster.chains for target in chain.targets)
    assert used == sorted(target for node in cluster.nodes for target in node.targets)
    assert all(len({target // 1000 for target in chain.targets}) == 2 for chain in cluster.chains)
    larger, node = with_new_node(cluster, None)
    assert (node.id, node.targets) == (4, (4001, 4002, 4003, 4004))
    assert larger.nodes[:-1] == cluster.nodes
    assert with_new_node(without_node(larger, 4), 1)[1].id == 5


def test_a_summary_counts_what_is_whole_and_what_can_be_read() -> None:
    serving, syncing, lastsrv = TargetState.SERVING, TargetState.SYNCING, TargetState.LASTSRV
    chains = (
        Chain(1, 1, (Member(1, 1, serving), Member(2, 2, serving))),
        Chain(2, 1, (Member(3, 1, serving), Member(4, 2, syncing))),
        Chain(3, 1, (Member(5, 1, lastsrv), Member(6, 2, TargetState.OFFLINE))),
    )
    report = TargetReport(1, Condition.ONLINE, 1, True, 10, 100)
    targets = (TargetStatus(1, 1, 1, False, report), TargetStatus(2, 2, 1, False, None))
    nodes = (NodeStatus(1, "a:1", 1, 0, True), NodeStatus(2, "b:1", 1, 0, False))
    found = summary_of(Status(1, 1, nodes, targets, chains, "c", 7))
    assert (found.nodes, found.alive, found.chains, found.whole, found.readable, found.syncing) == (2, 1, 3, 1, 2, 1)
    assert (found.used_bytes, found.capacity_bytes, found.sessions) == (10, 100, 7)


def test_the_free_space_of_a_disk_is_counted_once() -> None:
    def target(number: int, node: int, capacity_bytes: int, disk: int) -> TargetStatus:
        return TargetStatus(
            number, node, 1, False, TargetReport(1, Condition.ONLINE, 1, True, 10, capacity_bytes, 1, disk)
        )

    nodes = tuple(NodeStatus(node, "a:1", 1, 0, True, machine) for node, machine in ((1, "m"), (2, "m"), (3, "n")))
    shared = (target(1, 1, 110, 7), target(2, 1, 109, 7), target(3, 2, 110, 7))
    others = (target(4, 2, 60, 8), target(5, 3, 110, 7), target(6, 3, 30, 0), target(7, 3, 40, 0))
    found = summary_of(Status(1, 1, nodes, shared + others, ()))
    assert found.used_bytes == 70
    assert found.capacity_bytes == 70 + 100 + 50 + 100 + 20 + 30
