"""What the pages of a cluster of several machines tell an operator to type works: docs/how-to/cluster.md, and, with the
same cluster, add-storage-node.md, replace-disk.md, drain-node.md and restore-managers.md.

Machines are network namespaces, each with an sshd; PostgreSQL is real. They have no systemd: `systemctl` is a stand-in
that runs the process which the unit names. Commands are those of the pages, letter for letter; what this test does
beside them is what a page leaves to the operator (a user account, a disk that is exchanged, a machine that is lost).
"""

from __future__ import annotations

import re
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from tests.support.machines.machines import Machines, needs_machines
from tests.support.machines.operated import ANN, Operators, Typed, blocks_of, prepare
from tests.support.machines.postgres import start_postgres
from tests.support.platform.running import wait_for

pytestmark = [needs_machines, pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(900)]

PAGES: Final = Path(__file__).parents[3] / "docs" / "how-to"
CLUSTER_FILE: Final = "/etc/fireflyer/cluster.toml"
FINGERPRINTS: Final = {"a": "3f1c…", "b": "90ab…"}
SECRETS: Final = (
    "/etc/fireflyer/secret",
    "/etc/fireflyer/node-secret",
    "/root/ops-token",
    f"/home/{ANN}/token",
    "/root/platform.backup",
    "/root/files.pgdump",
)
"""Files whose contents, or a part of them, no other user may read anywhere."""
SEARCHED: Final = ("/etc/fireflyer", "/root", "/home", "/var/lib/fireflyer", "/shared", "/tmp", "/run/units")
MOST_BYTES: Final = 1 << 20
LOSE: Final = """\
pkill -KILL -f '[f]ireflyer'
while pgrep -f '[f]ireflyer' > /dev/null; do sleep 0.1; done
umount /disk1 /disk2; mount /disk1; mount /disk2
rm -rf /var/lib/fireflyer /etc/fireflyer /etc/systemd/system/fireflyer.service /root/.local /root/.config /run/units"""


class Cluster:
    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.operators = Operators(machines)
        self.secrets: dict[str, bytes] = {}

    # --- typing ---

    def follow(self, blocks: list[list[Typed] | str], *, expected: int) -> None:
        """Types blocks of commands; `expected`: how many."""
        commands = [typed for block in blocks if not isinstance(block, str) for typed in block]
        assert len(commands) == expected, [typed.command for typed in commands]
        for typed in commands:
            self.type(typed)
        self.no_secret_can_be_read()

    def type(self, typed: Typed) -> None:
        printed = self.operators.type(typed)
        if typed.command.startswith("ff host show"):
            fingerprint = re.search(r"--fingerprint (\w{64})", printed)
            if fingerprint:  # its manager has run
                self.operators.words[FINGERPRINTS[typed.machine]] = fingerprint[1]

    def until_all_serve(self) -> None:
        """All chains have all replicas, none is being copied to, and no target is drained."""

        def look() -> bool:
            said = self.operators.root("a", "ff fs status --all")
            chains = re.findall(r"^  chain .*$", said, re.MULTILINE)
            return len(chains) == 3 and all(chain.count("serving") == 2 for chain in chains)

        wait_for(look, "all chains serve with two replicas", limit_s=60)

    def until_nodes(self, **states: str) -> None:
        def look() -> bool:
            rows = [line.split() for line in self.operators.root("a", "ff nodes").splitlines()[1:]]
            return {row[0]: row[4] for row in rows} == states

        wait_for(look, f"nodes are {states}", limit_s=60)

    # --- what has to hold ---

    def no_secret_can_be_read(self) -> None:
        """By other users, in a file that the commands so far have made on any machine."""
        for path in SECRETS:
            for machine in self.machines.values():
                if machine.path(path).exists():
                    data = machine.path(path).read_bytes().strip()
                    self.secrets[f"{machine.name} {path}"] = data[-32:]
        for machine in self.machines.values():
            for path in SEARCHED:
                for file in readable_by_others(machine.path(path)):
                    data = file.read_bytes()
                    for name, secret in self.secrets.items():
                        assert secret not in data, f"{file} on {machine.name} shows {name} to all users"

    def has_platform_secret(self) -> set[str]:
        return {name for name, one in self.machines.items() if one.path("/etc/fireflyer/secret").exists()}

    def read_back(self) -> None:
        """Every file of ann is what it was, and her task too."""
        here = self.operators
        said = here.type(
            Typed("a", ANN, "rm -rf ~/back && ff fs get -r ff:///ann/many ~/back && diff -r ~/many ~/back", ())
        )
        assert not said.strip(), said
        assert "first" in here.type(Typed("a", ANN, "ff ps --state any", ()))


def readable_by_others(directory: Path) -> Iterator[Path]:
    """Small files below it, without what is mounted there."""
    try:
        found = directory.stat()
    except FileNotFoundError:
        return
    if found.st_mode & 0o001:
        yield from _readable(directory, found.st_dev)


def _readable(directory: Path, device: int) -> Iterator[Path]:
    for entry in directory.iterdir():
        found = entry.lstat()
        if found.st_dev != device:
            continue
        if stat.S_ISDIR(found.st_mode) and found.st_mode & 0o001:
            yield from _readable(entry, device)
        elif stat.S_ISREG(found.st_mode) and found.st_mode & 0o004 and found.st_size < MOST_BYTES:
            yield entry


def page(name: str) -> list[list[Typed] | str]:
    """Its blocks, in order."""
    return [block for _, block in blocks_of((PAGES / name).read_text())]


def test_what_the_pages_tell_an_operator_to_type_makes_a_cluster_and_changes_it(module_path: Path) -> None:
    module_path.chmod(0o777)
    with Machines(("a", "b", "c", "d"), shared=[module_path]) as machines:
        for machine in machines.values():
            prepare(machine, module_path)
        start_postgres(machines["c"], "10.88.0.0/16")
        cluster = Cluster(machines)
        set_up(cluster)
        add_storage_node(cluster)
        replace_disk(cluster)
        drain_nodes(cluster)
        restore_managers(cluster)


def set_up(cluster: Cluster) -> None:
    operators = cluster.operators
    operators.each = ("a", "b", "c")
    operators.root("c", "createdb -h c -U fireflyer fireflyer")
    make, file, *rest = page("cluster.md")
    cluster.follow([make], expected=2)
    assert isinstance(file, str)
    check_new_file(cluster, file)
    write_cluster_file(cluster, file)
    cluster.follow(rest, expected=25)
    assert cluster.has_platform_secret() == {"a", "b"}
    numbers = (
        "mkdir ~/many && cd ~/many && for i in $(seq 24); do seq $i 5000 > $i; done && ff fs put -r ~/many ff:///ann/"
    )
    operators.type(Typed("a", ANN, numbers, ()))
    cluster.read_back()


def check_new_file(cluster: Cluster, file: str) -> None:
    """What `ff host new-file` wrote is the file of the page, but for the id and what is marked DECIDE."""
    made, page_file = (tomllib.loads(text) for text in (cluster.machines["a"].path(CLUSTER_FILE).read_text(), file))
    assert made.pop("cluster") != page_file.pop("cluster")
    assert made.pop("store") == page_file.pop("store").replace("@c/", "@a/")
    assert made == page_file


def write_cluster_file(cluster: Cluster, text: str) -> None:
    cluster.machines["a"].path(CLUSTER_FILE).write_text(text)


def add_storage_node(cluster: Cluster) -> None:
    operators = cluster.operators
    host, *rest = page("add-storage-node.md")
    assert isinstance(host, str)
    write_cluster_file(cluster, cluster.machines["a"].path(CLUSTER_FILE).read_text() + "\n" + host)
    cluster.follow(rest, expected=9)
    assert cluster.has_platform_secret() == {"a", "b"}
    assert "400" in operators.root("a", "ff fs status --all | grep '^  chain'"), "a target of d serves a chain"
    cluster.until_nodes(a="idle", b="idle", c="idle", d="idle")
    cluster.read_back()


def replace_disk(cluster: Cluster) -> None:
    disk = cluster.machines["c"].path("/disk2/fireflyer")
    worn = disk.with_name("worn")
    worn.touch()
    drain, exchange, mount, undrain = page("replace-disk.md")
    cluster.follow([drain, exchange], expected=3)
    assert not disk.exists(), "the disk is out"
    cluster.read_back()
    cluster.follow([mount, undrain], expected=5)
    cluster.until_all_serve()
    assert disk.exists()
    assert not worn.exists(), "it is the new disk"
    cluster.read_back()


def drain_nodes(cluster: Cluster) -> None:
    drain, stop, start, use, leave, end, forget, copy = page("drain-node.md")
    cluster.follow([drain, stop], expected=4)
    cluster.read_back()
    cluster.follow([start, use], expected=3)
    cluster.until_all_serve()
    cluster.follow([leave, end], expected=5)
    cluster.until_nodes(a="idle", b="idle", c="idle", d="lost:")
    cluster.follow([forget], expected=2)
    before, _, _ = cluster.machines["a"].path(CLUSTER_FILE).read_text().partition('\n\n[[hosts]]\nname = "d"')
    write_cluster_file(cluster, before + "\n")
    cluster.follow([copy], expected=1)
    cluster.until_nodes(a="idle", b="idle", c="idle")
    cluster.until_all_serve()
    cluster.read_back()


def restore_managers(cluster: Cluster) -> None:
    operators = cluster.operators
    back_up, machine, log_in, stop, restore, start, join = page("restore-managers.md")
    cluster.follow([back_up], expected=3)
    operators.root("b", LOSE)
    cluster.read_back()
    cluster.follow([machine, log_in], expected=8)
    log_in_of_ann = next(
        typed
        for block in page("cluster.md")
        if not isinstance(block, str)
        for typed in block
        if typed.user == ANN and typed.command.startswith("ff login")
    )
    operators.type(log_in_of_ann)
    cluster.until_nodes(a="idle", b="idle", c="idle")
    cluster.until_all_serve()
    operators.type(Typed("a", ANN, "echo later | ff fs put - /ann/later", ()))

    operators.root("c", "dropdb -h c -U fireflyer --force fireflyer")
    cluster.follow([stop, restore, start, join], expected=11)
    cluster.until_nodes(a="idle", b="idle", c="idle")
    cluster.until_all_serve()
    assert operators.type(Typed("a", ANN, "ff fs ls /ann", ())).split() == ["many", "numbers"]
    cluster.read_back()
