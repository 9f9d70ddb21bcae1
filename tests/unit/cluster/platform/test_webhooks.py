"""Notifications by webhooks: queued with the change itself, sent at least once and in order, bounded, given up."""

from __future__ import annotations

import random

import msgspec
import pytest
from tests.support.platform.desk import Desk, spec
from tests.support.platform.store import carried_out

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.platform import messages, webhooks
from fireflyer.cluster.core.platform.access import OPERATOR
from fireflyer.cluster.core.platform.commands import StopTask
from fireflyer.cluster.core.platform.webhooks import (
    GIVE_UP_NS,
    MAX_PENDING_OF_USER,
    AddWebhook,
    Deliver,
    Delivered,
    RemoveWebhook,
    SendTest,
    WebhookChange,
)
from fireflyer.cluster.manager.webhook_http import parse_target
from fireflyer.cluster.schema.tasks import Cause
from fireflyer.cluster.schema.webhooks import EventKind, NewWebhook, Notification, WebhookView
from fireflyer.kvstore.core.fenced import Transact

URL = "https://hooks.example.com/a"


def ask(desk: Desk, change: WebhookChange, user: str = "ann", roles: tuple[str, ...] = ()) -> messages.Result:
    call = 10_000 + len(desk.results)
    desk.handle(messages.WebhookAsked(call=call, user=user, roles=roles, change=change))
    return desk.results[call]


def add(desk: Desk, user: str = "ann", **fields: object) -> int:
    new = msgspec.convert({"url": URL, **fields}, NewWebhook)
    done = ask(desk, AddWebhook(new, b"nonce"), user, (OPERATOR,) if user == "op" else ())
    assert isinstance(done, messages.Done), done
    return done.number


def answer(desk: Desk, order: Deliver, *, ok: bool, final: bool = False) -> None:
    text = "answered 200" if ok else "answered 500"
    desk.handle(Delivered(webhook=order.webhook, number=order.number, ok=ok, text=text, final=final))


def view(desk: Desk, user: str = "ann") -> WebhookView:
    (found,) = desk.machine.webhooks(user, desk.now_ns)
    return found


def told(order: Deliver) -> Notification:
    return msgspec.json.decode(order.body, type=Notification)


def test_a_task_tells_its_way_in_order_one_after_the_other() -> None:
    desk = Desk("n1")
    add(desk)
    task = desk.task(spec())
    desk.runs_on(task, *desk.nodes_of(task))
    desk.gone(task, Cause.SUCCEEDED)
    (first,) = desk.deliveries
    assert (told(first).type, told(first).data.task, told(first).data.run) == ("task.started", task, 0)
    answer(desk, first, ok=True)
    _, second = desk.deliveries
    assert (told(second).type, told(second).data.outcome) == ("task.ended", "succeeded")
    assert first.event_id != second.event_id
    answer(desk, second, ok=True)
    assert (view(desk).delivered, view(desk).pending, view(desk).last) == (2, 0, "answered 200")


def test_all_that_is_shown_is_committed() -> None:
    """Nothing of a delivery while its transaction is under way, and then all of it."""
    desk = Desk("n1")
    add(desk)
    task = desk.task(spec())
    desk.runs_on(task, *desk.nodes_of(task))
    (sent,) = desk.deliveries
    delivered = Delivered(webhook=sent.webhook, number=sent.number, ok=True, text="answered 200")
    (transact,) = (one for one in desk.machine.handle(desk.now_ns, delivered) if isinstance(one, Transact))
    assert (view(desk).delivered, view(desk).pending) == (0, 1)
    desk.handle(carried_out(desk.rows, transact))
    assert (view(desk).delivered, view(desk).pending) == (1, 0)


def test_what_was_sent_and_not_recorded_is_sent_again_by_the_next_leader_with_the_same_id() -> None:
    desk = Desk("n1")
    add(desk)
    desk.task(spec())
    task = 1
    desk.runs_on(task, *desk.nodes_of(task))
    (sent,) = desk.deliveries
    later = Desk(rows=desk.rows, holder="m1")
    (again,) = later.deliveries
    assert (again.event_id, again.body) == (sent.event_id, sent.body)


def test_failures_rest_for_longer_and_are_given_up_after_a_day() -> None:
    desk = Desk()
    number = add(desk)
    assert isinstance(ask(desk, SendTest(number)), messages.Done)
    spans, last_ns = [], desk.now_ns
    answer(desk, desk.deliveries[-1], ok=False)
    while view(desk).pending:
        retry_ns = view(desk).retry_in_ns
        assert retry_ns is not None
        desk.pass_time(retry_ns + SECOND, hear=False, step_ns=retry_ns + SECOND)
        desk.pass_time(20 * SECOND, hear=False, step_ns=SECOND)
        spans.append(desk.now_ns - last_ns)
        last_ns = desk.now_ns
        if len(desk.deliveries) > len(spans):
            answer(desk, desk.deliveries[-1], ok=False)
        assert len(spans) < 60
    assert spans[:4] == sorted(spans[:4])
    assert desk.now_ns >= GIVE_UP_NS
    assert (view(desk).given_up, view(desk).delivered, view(desk).last) == (1, 0, "answered 500")
    assert len({order.event_id for order in desk.deliveries}) == 1


def test_a_user_has_so_many_that_wait_and_the_rest_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_PENDING_OF_USER == 1000
    monkeypatch.setattr(webhooks, "MAX_PENDING_OF_USER", 3)
    desk = Desk()
    number = add(desk)
    other = add(desk, user="bob")
    results = [ask(desk, SendTest(number)) for _ in range(5)]
    assert [type(result) for result in results[3:]] == [messages.Refused, messages.Refused]
    assert isinstance(ask(desk, SendTest(other), user="bob"), messages.Done)
    assert isinstance(ask(desk, RemoveWebhook(number), user="bob"), messages.Refused)
    assert isinstance(ask(desk, RemoveWebhook(number)), messages.Done)
    answer(desk, desk.deliveries[0], ok=True)
    assert not desk.machine.webhooks("ann", desk.now_ns)
    assert view(desk, "bob").pending == 1


def test_named_webhooks_hear_of_tasks_that_name_them_and_nodes_are_for_operators() -> None:
    desk = Desk("n1")
    add(desk, named=True)
    refused = ask(desk, AddWebhook(NewWebhook(url=f"{URL}/b", events=("node.lost",)), b"n"))
    assert isinstance(refused, messages.Refused)
    add(desk, user="op", events=["node.lost"])
    task = desk.task(spec())
    desk.runs_on(task, *desk.nodes_of(task))
    assert not desk.deliveries
    named = desk.task(spec(name="named", notify=URL))
    desk.command(StopTask(task=named), user="ann")
    assert [told(order).type for order in desk.deliveries] == ["task.ended"]
    no_such = desk.submit(spec(name="other", notify=f"{URL}/none"))
    assert isinstance(no_such, messages.Refused)
    assert "ff webhook add" in no_such.message
    desk.pass_time(60 * SECOND, hear=False)
    assert [told(order).data.node for order in desk.deliveries if told(order).type == "node.lost"] == ["n1"]


@pytest.mark.parametrize("seed", range(15))
def test_whatever_fails_nothing_is_lost_and_nothing_is_told_twice_as_two(seed: int) -> None:
    """Managers are killed and transactions fail at random while a receiver answers at random."""
    draw = random.Random(seed)
    desk = Desk()
    number = add(desk)
    wanted, received, heard = 0, dict[str, EventKind](), list[str]()
    answered = 0
    for step in range(60):
        if draw.random() < 0.4 and wanted < 15 and isinstance(ask(desk, SendTest(number)), messages.Done):
            wanted += 1
        if draw.random() < 0.15:
            desk = Desk(rows=desk.rows, holder=f"m{seed}-{step}")
            answered = 0
        for order in desk.deliveries[answered:]:
            answered += 1
            if draw.random() < 0.7:
                received.setdefault(order.event_id, told(order).type)
                heard.append(order.event_id)
                if draw.random() < 0.7:
                    answer(desk, order, ok=True)
                    continue
                desk = Desk(rows=desk.rows, holder=f"k{seed}-{step}")  # killed before it was recorded
                answered = 0
                break
            answer(desk, order, ok=False)
        desk.pass_time(draw.choice((SECOND, 60 * SECOND)), hear=False, step_ns=10 * SECOND)
    for _ in range(100):
        if not view(desk).pending:
            break
        for order in desk.deliveries[answered:]:
            answered += 1
            received.setdefault(order.event_id, told(order).type)
            answer(desk, order, ok=True)
        desk.pass_time(600 * SECOND, hear=False, step_ns=20 * SECOND)
    assert view(desk).pending == 0
    assert len(received) == wanted
    assert [one for at, one in enumerate(heard) if one not in heard[:at]] == sorted(set(heard), key=heard.index)


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1/x",
        "https://[::1]/x",
        "https://10.1.2.3/",
        "https://169.254.169.254/latest/meta-data",
        "https://[::ffff:192.168.0.1]/",
        "https://[64:ff9b::a00:1]/",
        "https://[2002:7f00:1::]/",
        "https://[fe80::1]/",
        "https://0.0.0.0/",
        "https://224.0.0.1/",
        "https://100.64.0.1/",
        "http://hooks.example.com/",
        "https://user:pass@hooks.example.com/",
        "https://hooks.example.com/#part",
        "ftp://hooks.example.com/",
        "https://hooks.example.com:0/",
        "https://hooks.example.com/a b",
        "https:///none",
        "https://hooks.example.com/\r\nHost: other",
    ],
)
def test_hostile_urls_are_refused(url: str) -> None:
    with pytest.raises(UsageError):
        parse_target(url, ())


def test_public_addresses_and_listed_networks_are_allowed() -> None:
    import ipaddress

    assert parse_target("https://1.1.1.1/x?y=1", ()).path == "/x?y=1"
    networks = (ipaddress.ip_network("127.0.0.0/8"),)
    assert parse_target("http://127.0.0.1:8080/", networks).port == 8080
    with pytest.raises(UsageError, match="webhook_networks"):
        parse_target("https://10.0.0.1/", networks)
    with pytest.raises(UsageError, match="HTTPS"):
        parse_target("http://1.1.1.1/", networks)
