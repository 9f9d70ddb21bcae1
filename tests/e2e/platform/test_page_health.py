"""The page of faulty nodes in a real browser, against scripted answers."""

from __future__ import annotations

import json

import msgspec
import pytest
from playwright.sync_api import Page, expect
from tests.support.platform.pages import CONTRAST, HOST, HOSTILE, NODES, UNNAMED, ScriptedPlatform, node

from fireflyer.cluster.core.health.findings import Finding
from fireflyer.cluster.core.health.records import Action, RepairTicket
from fireflyer.cluster.core.platform.views import HealthView, NodeView

pytestmark = [pytest.mark.processes, pytest.mark.slow]

BEGAN_NS = 1_790_000_000 * 10**9
FAULT = Finding(
    check="kernel_log",
    severity="high",
    part="gpu:0000:3b:00.0",
    serial="1654922",
    cause="xid_79",
    words=HOSTILE,
    seen_ns=1,
)
TICKET = RepairTicket(
    id=41,
    node="node-0002",
    fault=FAULT,
    opened_ns=BEGAN_NS,
    opened_by="health",
    actions=(
        Action(at_ns=BEGAN_NS, by="health", what="drained", words=HOSTILE),
        Action(at_ns=BEGAN_NS + 10**12, by="ada", what="reboot", words="from the rack"),
    ),
)


def faulty(number: int, state: str, *, hold: str = "none", ticket: RepairTicket | None = None) -> NodeView:
    health = HealthView(
        state=state,
        since_ns=BEGAN_NS + number * 10**9,
        reason=f"kernel_log of gpu {number}: {HOSTILE}",
        hold=hold,
        until_ns=BEGAN_NS + 10**13 if state == "probation" else None,
        faults=number,
        policy=1,
        ticket=ticket,
    )
    return msgspec.structs.replace(node(number), health=health)


@pytest.fixture
def shown(page: Page, scripted: ScriptedPlatform) -> Page:
    scripted.nodes[1] = faulty(1, "probation")
    scripted.nodes[2] = faulty(2, "field diagnosis", ticket=TICKET)
    scripted.nodes[3] = faulty(3, "suspect", hold="breaker")
    scripted.nodes[4] = faulty(4, "healthy")
    page.goto(f"{HOST}/#/health")
    expect(page.get_by_role("heading", name="Health")).to_be_visible()
    return page


def test_faulty_nodes_say_why_and_those_out_of_service_come_first(shown: Page) -> None:
    rows = shown.locator("tbody tr")
    expect(rows).to_have_count(3)
    for row, words in enumerate(["node-0003", "node-0002", "node-0001"]):
        expect(rows.nth(row)).to_contain_text(words)
    expect(rows.nth(0)).to_contain_text("not drained: as many nodes are out as the policy allows")
    expect(rows.nth(2)).to_contain_text("at least until")
    for count, state in [(NODES - 3, "healthy"), (1, "suspect"), (1, "field diagnosis"), (1, "probation")]:
        expect(shown.locator(".card", has_text=state)).to_contain_text(str(count))
    assert shown.title() == "Fire-Flyer", "what a check wrote is text"


def test_the_ticket_of_a_repair_lists_what_was_done_and_texts_of_checks_stay_texts(shown: Page) -> None:
    shown.get_by_role("button", name="Repairs of node-0002").click()
    expect(shown.get_by_role("heading", name="Repairs of node-0002")).to_be_visible()
    expect(shown.locator("main dl")).to_contain_text("kernel_log gpu:0000:3b:00.0")
    expect(shown.locator("main dl")).to_contain_text("1654922")
    expect(shown.get_by_role("row", name="reboot from the rack")).to_contain_text("ada")
    shown.get_by_role("button", name="Repairs of node-0003").click()
    expect(shown.get_by_text("None is under way.")).to_be_visible()
    assert shown.title() == "Fire-Flyer"


def test_an_operator_records_a_repair_and_returns_a_node(shown: Page, scripted: ScriptedPlatform) -> None:
    shown.once("dialog", lambda dialog: dialog.accept(" Reboot "))
    shown.get_by_role("button", name="Record a repair of node-0002").click()
    expect(shown.get_by_text("done", exact=True)).to_be_visible()
    with shown.expect_response("**/commands"):
        shown.get_by_role("button", name="Test node-0002 and return it").click()
    assert [json.loads(one) for one in scripted.commanded] == [
        {"type": "RecordRepair", "node": "node-0002", "remedy": "reboot"},
        {"type": "ReturnNode", "node": "node-0002"},
    ]
    expect(shown.get_by_role("button", name="Test node-0001 and return it")).to_have_count(0)


def test_a_cluster_without_faulty_nodes_says_so(page: Page) -> None:
    page.goto(f"{HOST}/#/health")
    expect(page.get_by_text("No node is faulty")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_on_a_phone_and_by_all(shown: Page, scheme: str) -> None:
    shown.get_by_label("Colours").select_option(scheme)
    shown.get_by_role("button", name="Repairs of node-0002").click()
    expect(shown.locator("main dl")).to_be_visible()
    for width in (390, 1280):
        shown.set_viewport_size({"width": width, "height": 844})
        assert shown.evaluate("document.documentElement.scrollWidth") <= width
        assert shown.evaluate(CONTRAST) == []
        assert shown.evaluate(UNNAMED) == []
