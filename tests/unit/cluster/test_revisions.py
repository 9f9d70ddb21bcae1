"""Agents and managers that are too far apart refuse each other, and say who is to be upgraded."""

from __future__ import annotations

import msgspec
import pytest

from fireflyer.base.errors import PermissionDenied
from fireflyer.cluster.core import revisions
from fireflyer.cluster.core.revisions import check_agent, check_manager
from fireflyer.cluster.schema.sync import Inventory, Orders, Sync

INVENTORY = Inventory(address="h", port=1, version="0.3.0", boot_id="", hostname="h", cores=1, memory_bytes=1)
SAID = Sync(incarnation=1, sequence=1, heard=0, inventory=INVENTORY)
ORDERS = Orders(term=1, version=1, release="0.5.0")


@pytest.mark.parametrize(
    ("theirs", "agent_older", "manager_older"),
    [
        (2, "upgrade the agent of this machine", "upgrade the managers"),
        (6, "upgrade the managers", "upgrade the agent of this machine"),
    ],
)
def test_two_apart_is_refused_by_both_sides_which_name_the_older_one(
    monkeypatch: pytest.MonkeyPatch, theirs: int, agent_older: str, manager_older: str
) -> None:
    monkeypatch.setattr(revisions, "REVISION", 4)
    with pytest.raises(PermissionDenied) as refused:
        check_agent("gpu-1", msgspec.structs.replace(SAID, revision=theirs), "0.5.0")
    assert refused.value.message == (
        f"the agent of gpu-1 is of release 0.3.0 (revision {theirs}), this manager of 0.5.0 (revision 4); they may be "
        f"1 apart: {agent_older}, one release after the other"
    )
    with pytest.raises(PermissionDenied) as refused:
        check_manager(msgspec.structs.replace(ORDERS, revision=theirs), "0.4.0")
    assert refused.value.message == (
        f"the manager is of release 0.5.0 (revision {theirs}), this agent of 0.4.0 (revision 4); they may be 1 apart: "
        f"{manager_older}, one release after the other"
    )
    for one in (3, 4, 5):
        check_agent("gpu-1", msgspec.structs.replace(SAID, revision=one), "0.5.0")
        check_manager(msgspec.structs.replace(ORDERS, revision=one), "0.4.0")


def test_the_release_before_did_not_say_its_revision_and_is_understood() -> None:
    check_agent("gpu-1", SAID, "0.5.0")
    check_manager(msgspec.structs.replace(ORDERS, release=""), "0.4.0")
