"""What `ff top` shows fits a terminal, and is text whatever users wrote."""

from __future__ import annotations

from tests.support.platform.desk import WALL_NS, Desk, spec

from fireflyer.cli.platform.top import screen


def shown(desk: Desk, width: int | None, height: int) -> list[str]:
    cluster, nodes = desk.machine.cluster(desk.now_ns), desk.machine.nodes(desk.now_ns)
    tasks = [task for task in desk.machine.tasks(desk.now_ns) if task.ended_ns is None]
    return screen(cluster, nodes, tasks, width, height, WALL_NS)


def test_what_runs_comes_first_then_what_is_more_important() -> None:
    desk = Desk("n1", "n2")
    desk.task(spec("low"))
    desk.task(spec("wide", least_nodes=2, most_nodes=2))
    desk.task(spec("wider", least_nodes=2, most_nodes=2, priority=20))
    lines = shown(desk, None, 50)
    assert lines[0] == "nodes  1 of 2 in use; 1 busy, 1 idle"
    assert lines[1].startswith("tasks  1 scheduled, 2 queued")
    assert [line.split()[-1] for line in lines[4:]] == ["low", "wider", "wide"]


def test_it_fits_the_terminal_and_says_what_it_leaves_out() -> None:
    desk = Desk("n1")
    for number in range(30):
        desk.task(spec(f"a-task-with-quite-a-long-name-{number}"))
    for width, height in ((40, 12), (20, 6), (80, 24)):
        lines = shown(desk, width, height)
        assert len(lines) <= height
        assert max(map(len, lines)) <= width
    assert shown(desk, 80, 12)[-1] == "and 23 more: ff ps --all-users"
    assert "no tasks" in shown(Desk("n1"), 80, 12)
