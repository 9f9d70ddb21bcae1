"""Agents and managers one release apart understand each other: new fields have defaults, unknown ones are ignored."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest
from tests.support.platform.older_release import Older, older_fields

from fireflyer.cluster.schema.sync import HealthOrder, Orders, Sync

INVENTORY: Final = {
    "address": "10.0.0.1", "port": 7000, "version": "0.0.9", "boot_id": "b", "hostname": "h", "cores": 8,
    "memory_bytes": 1 << 30,
}  # fmt: skip
OLDER_HELLO: Final = {"incarnation": 3, "sequence": 7, "heard": 0, "inventory": INVENTORY}
"""What the first release of agents says; fields that came later must not be added here."""
OLDER_ORDERS: Final = {"term": 4, "version": 9}
RUN: Final = {"token": "00112233445566778899aabbccddeeff", "state": "running"}


def test_a_manager_hears_an_agent_of_an_older_release() -> None:
    heard = msgspec.msgpack.decode(msgspec.msgpack.encode(OLDER_HELLO), type=Sync)
    assert (heard.sequence, heard.inventory.version, heard.runs) == (7, "0.0.9", ())


def test_a_manager_hears_an_agent_of_a_newer_release() -> None:
    newer = {**OLDER_HELLO, "later": [1], "inventory": {**INVENTORY, "later": {}}, "runs": [{**RUN, "later": "x"}]}
    heard = msgspec.msgpack.decode(msgspec.msgpack.encode(newer), type=Sync)
    assert [run.token for run in heard.runs] == [RUN["token"]]


@pytest.mark.parametrize("later", [{}, {"later": 1}])
def test_an_agent_follows_orders_of_a_manager_of_another_release(later: dict[str, Any]) -> None:
    order = {"run_token": RUN["token"], "wanted": "stop", **later}
    sent = {**OLDER_ORDERS, "runs": [order], **later}
    orders = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Orders)
    assert (orders.term, orders.runs[0].wanted) == (4, "stop")


def test_the_older_release_of_tests_says_and_sees_the_fields_before_the_newest_ones() -> None:
    older = Older(older_fields())
    ended = {"cause": "program", "exit_code": 3, "corrupt": ["n1"]}
    newer = msgspec.convert({**OLDER_HELLO, "runs": [{**RUN, "doing": "x", "ended": ended}]}, Sync)
    said = older.said(newer)
    assert said["runs"][0]["doing"] == "x"
    assert said["runs"][0]["ended"]["exit_code"] == 3
    assert "corrupt" not in said["runs"][0]["ended"], "of the end of a run the newest field is left out"
    health = HealthOrder(program=("/opt/health",), follow=("/opt/follow",))
    heard = older.heard(Orders(term=1, version=2, release="9.9", health=health))
    assert (heard.version, heard.release) == (2, "9.9")
    assert heard.health == HealthOrder(program=("/opt/health",)), "of an order the newest field is left out"
