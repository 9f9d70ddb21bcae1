"""The seeded world: order of events, crashes that leave nothing behind, the same history for the same seed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator

import pytest
from tests.support.sim_history import history

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MS, SECOND
from fireflyer.sim import Link, MachineDriver, SimClock, SimCrash, SimNet, SimNode, World


def nothing(_node: SimNode) -> None:
    pass


def test_events_run_in_order_of_time_and_then_of_asking() -> None:
    world = World(1)
    order: list[str] = []

    def then() -> None:
        world.call_after(0, lambda: order.append("third"))

    world.call_at(5, lambda: order.append("late"))
    world.call_at(3, lambda: order.append("first"))
    world.call_at(3, lambda: order.append("second"))
    world.call_at(3, then)
    world.run()
    assert order == ["first", "second", "third", "late"]
    assert world.now_ns == 5


def test_a_run_stops_at_its_time_and_goes_on_from_there() -> None:
    world = World(1)
    seen: list[int] = []
    for at_ns in (10, 20, 30):
        world.call_at(at_ns, lambda at_ns=at_ns: seen.append(at_ns))  # type: ignore[misc]
    world.run(until_ns=25)
    assert (seen, world.now_ns) == ([10, 20], 25)
    world.run()
    assert seen == [10, 20, 30]


def test_a_cancelled_timer_does_not_fire() -> None:
    world = World(1)
    timer = world.call_after(1, pytest.fail)
    timer.cancel()
    world.run()
    assert not timer.pending


def test_clocks_are_shifted_and_drift() -> None:
    world = World(1)
    clock = SimClock(world, offset_ns=100, drift_ppm=50)
    world.run(until_ns=SECOND)
    assert clock.now_ns() == 100 + SECOND + 50_000


def test_a_crash_takes_timers_tasks_and_handlers_with_it_and_a_restart_boots_afresh() -> None:
    world = World(1)
    log: list[str] = []

    def task() -> Generator[int | None, None, None]:
        while True:
            log.append("task")
            yield MS

    def boot(node: SimNode) -> None:
        log.append(f"boot {node.incarnation}")
        if node.incarnation == 1:
            node.after(10 * MS, lambda: log.append("timer"))
            node.spawn(task())
            node.on_message(lambda source, _payload: log.append(f"from {source}"))

    node = world.node("a", boot)
    world.run(until_ns=3 * MS)
    assert log.count("task") in (2, 3, 4)
    node.crash()
    before = list(log)
    world.run(until_ns=SECOND)
    assert log == before
    assert not node.deliver("b", b"x")
    node.restart()
    assert log[-1] == "boot 2"
    assert not node.deliver("b", b"x"), "the new incarnation does not listen"


def test_a_crash_from_inside_kills_only_its_node() -> None:
    world = World(1)
    log: list[str] = []

    def dies() -> None:
        raise SimCrash

    victim, other = world.node("victim", nothing), world.node("other", nothing)
    victim.after(1, dies)
    victim.after(2, lambda: log.append("victim"))
    other.after(2, lambda: log.append("other"))
    world.run()
    assert (victim.alive, other.alive, log) == (False, True, ["other"])


def test_the_net_loses_duplicates_and_reorders_but_never_alters() -> None:
    world = World(7)
    net = SimNet(world, default=Link(loss=0.2, duplication=0.2))
    got: list[int] = []
    world.node("a", nothing)
    world.node("b", lambda node: node.on_message(lambda _source, payload: got.append(payload[0])))
    for number in range(200):
        net.send("a", "b", bytes([number]))
    world.run()
    assert got != sorted(got)
    assert 100 < len({*got}) < 200
    assert len(got) > len({*got})
    assert (net.sent, net.delivered) == (200, len(got))


def test_an_ordered_link_keeps_the_order() -> None:
    world = World(7)
    net = SimNet(world, default=Link(ordered=True, slow_probability=0.3, slow_ns=SECOND))
    got: list[int] = []
    world.node("b", lambda node: node.on_message(lambda _source, payload: got.append(payload[0])))
    for number in range(100):
        net.send("a", "b", bytes([number]))
    world.run()
    assert got == list(range(100))


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_partition_cuts_what_is_in_flight_and_heals(symmetric: bool) -> None:
    world = World(7)
    net = SimNet(world)
    got: list[str] = []
    for name in ("a", "b"):
        world.node(name, lambda node: node.on_message(lambda source, _payload: got.append(source)))
    net.send("a", "b", b"in flight")
    net.partition(["a"], ["b"], symmetric=symmetric)
    net.send("b", "a", b"back")
    world.run()
    assert got == ([] if symmetric else ["b"])
    got.clear()
    net.heal()
    net.send("a", "b", b"after")
    world.run()
    assert got == ["a"]


def test_a_message_to_a_restarted_node_is_lost() -> None:
    world = World(7)
    net = SimNet(world)
    got: list[bytes] = []
    node = world.node("b", lambda node: node.on_message(lambda _source, payload: got.append(payload)))
    net.send("a", "b", b"old")
    node.restart()
    net.send("a", "b", b"new")
    world.run()
    assert got == [b"new"]


class Counter:
    """Asks for `work` until it has counted to three."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []

    def handle(self, now_ns: int, event: str) -> list[str]:
        self.seen.append((now_ns, event))
        return ["work"] if len(self.seen) < 3 else []


def test_a_driver_performs_effects_in_order_and_dies_with_its_node() -> None:
    def perform(effect: str) -> Generator[int | None, None, str | None]:
        yield MS
        return f"done {effect}"

    world = World(3)
    node = world.node("a", nothing)
    machine = Counter()
    driver = MachineDriver(node, machine, perform)
    driver.submit("start")
    world.run()
    assert [event for _, event in machine.seen] == ["start", "done work", "done work"]
    assert driver.idle

    machine = Counter()
    driver = MachineDriver(node, machine, perform)
    driver.submit("start")
    node.crash()
    world.run()
    assert [event for _, event in machine.seen] == ["start"]


def test_names_are_taken_once() -> None:
    world = World(1)
    world.node("a", nothing)
    with pytest.raises(UsageError, match="exists already"):
        world.node("a", nothing)


def test_the_same_seed_gives_the_same_history_under_any_hash_seed() -> None:
    """The history is a whole checkpointing job with a crash, a lossy network and a recovery."""
    program = "import sys; from tests.support.sim_history import history; sys.stdout.buffer.write(history(11))"
    traces = []
    for hash_seed in ("1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
        traces.append(done.stdout)
    assert traces[0] == traces[1] == history(11)
    assert len(traces[0].splitlines()) > 150
    assert history(12) != traces[0]
