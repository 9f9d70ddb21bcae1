"""Commands of researchers and operators as they are typed, with a platform of real processes behind them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from tests.support.platform.running import RunningPlatform

from fireflyer.cli import main
from fireflyer.cluster.client import Client
from fireflyer.cluster.core.platform.views import TaskView
from fireflyer.cluster.schema.logs import LogText
from fireflyer.cluster.schema.tasks import FINISHED, Cause, Outcome, TaskState

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SCRIPT: Final = """\
import os, sys, time
names = ("FF_ARRAY_INDEX", "FF_ARRAY_SIZE", "WRAPPED", "FF_LOG_FILE")
print(*(os.environ.get(name) for name in names), flush=True)
if "hang" in sys.argv:
    time.sleep(600)
sys.exit(3 if "fail" in sys.argv else 0)
"""


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPlatform]:
    with RunningPlatform(tmp_path_factory.mktemp("commands") / "platform", nodes=3) as running:
        yield running


class Typed:
    """A researcher at a directory with `t.py`."""

    def __init__(self, platform: RunningPlatform, capsys: pytest.CaptureFixture[str]) -> None:
        self.client: Client = platform.client()
        self._platform = platform
        self._capsys = capsys

    def ff(self, words: str, *more: str) -> str:
        """What it prints."""
        code = main([*words.split(), *more])
        shown = self._capsys.readouterr()
        assert code == 0, shown.err
        return shown.out

    def error(self, words: str, *more: str, code: int = 2) -> str:
        """The one line that it prints."""
        assert main([*words.split(), *more]) == code
        shown = self._capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith("error: ")
        assert shown.err.count("\n") == 1
        return shown.err.removeprefix("error: ").removesuffix("\n")

    def submit(self, options: str, *arguments: str, wrap: str = "") -> int:
        """The task, or the first one."""
        wrapped = ["--wrap", wrap] if wrap else []
        said = self.ff(f"submit --no-snapshot {options}", *wrapped, "t.py", *arguments).split()
        return int(said[1])

    def end(self, task: int) -> TaskView:
        return self._platform.finished(self.client, task).task

    def printed(self, task: int) -> str:
        assert self.end(task).outcome is Outcome.SUCCEEDED
        return "".join(event.text for event in self.client.logs(task) if isinstance(event, LogText))

    def node_of(self, task: int) -> str:
        assert self.end(task).state is FINISHED
        (run,) = self.client.task(task).runs
        return " ".join(run.nodes)


@pytest.fixture
def typed(
    platform: RunningPlatform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Typed:
    (tmp_path / "t.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FIREFLYER_PLATFORM", str(platform.directory))
    return Typed(platform, capsys)


def nodes(typed: Typed) -> dict[str, Any]:
    return {one["name"]: one for one in map(json.loads, typed.ff("nodes --json").splitlines())}


def test_time_sharing_is_shown_and_set_one_setting_at_a_time(typed: Typed) -> None:
    before = typed.ff("time-sharing").splitlines()
    assert "cross-zone-nodes  16" in before
    after = typed.ff("time-sharing --cross-zone-nodes 4 --usage-half-life 12h").splitlines()
    assert set(after) - set(before) == {"cross-zone-nodes  4", "usage-half-life   12 h 00 min"}
    assert typed.ff("time-sharing").splitlines() == after
    assert typed.error("time-sharing --age-step 2x").startswith("--age-step: ")
    typed.ff("time-sharing --cross-zone-nodes 16 --usage-half-life 24h")
    assert typed.ff("time-sharing").splitlines() == before


def test_labels_and_places_of_nodes_are_what_was_typed_and_tasks_go_by_them(typed: Typed) -> None:
    assert typed.ff("node label agent-1 fast a100") == "node agent-1 has the labels a100, fast\n"
    assert "group big, zone east, leaf l1" in typed.ff("node move agent-2 --group big --zone east --leaf l1")
    found = nodes(typed)
    assert (found["agent-1"]["labels"], found["agent-2"]["leaf"]) == (["a100", "fast"], "l1")
    assert "leaf l1\n    agent-2" in typed.ff("nodes --tree")

    assert typed.node_of(typed.submit("--constraint fast,a100")) == "agent-1"
    for options, there in (
        ("--constraint a100", "agent-1"),
        ("--exclude agent-1", "agent-3"),
        ("--nodelist agent-1,agent-3 --nodes 2", "agent-1 agent-3"),
        ("--group big", "agent-2"),
    ):
        said = typed.ff(f"submit --no-snapshot --test-only {options} t.py")
        announced = said.splitlines()[-1].removeprefix("on ")
        assert sorted(announced.split()) == there.split(), said
        assert announced == typed.node_of(typed.submit(options)), said

    assert "group default, zone (none), leaf l1" in typed.ff("node move agent-2 --group default --zone", "")
    assert typed.ff("node label agent-1") == "node agent-1 has the labels (none)\n"
    assert nodes(typed)["agent-1"]["labels"] == []


def test_an_array_is_told_its_indices_and_a_wrap_stands_before_the_command(typed: Typed) -> None:
    """And no variable of the agents' own logs reaches ranks."""
    first = typed.submit("--array 2", wrap="env WRAPPED=yes")
    assert [typed.printed(first + index) for index in range(2)] == [f"{index} 2 yes None\n" for index in range(2)]


def test_tasks_run_after_others_or_end_with_them(typed: Typed) -> None:
    failing = typed.submit("--max-restarts 0", "fail")
    after = typed.submit(f"--after {failing}")
    never = typed.submit(f"--after {failing}:ok")
    assert (typed.end(failing).outcome, typed.end(failing).exit_code) == (Outcome.FAILED, 3)
    assert typed.printed(after) == "None None None None\n"
    assert typed.client.task(after).runs[0].scheduled_ns >= (typed.end(failing).ended_ns or 0)
    assert typed.end(never).reason == f"task {failing}, after whose success it was to run, has not succeeded"
    assert typed.end(never).runs == 0


def test_a_watchdog_and_a_declared_time_end_runs(typed: Typed) -> None:
    hung = typed.submit("--watchdog 1s --max-restarts 0", "hang")
    late = typed.submit("--time 1s", "hang")
    assert (typed.end(hung).outcome, typed.end(hung).cause) == (Outcome.FAILED, Cause.HUNG)
    assert "--watchdog" in typed.end(hung).reason
    assert (typed.end(late).outcome, typed.end(late).cause) == (Outcome.FAILED, Cause.TIME_LIMIT)
    assert "longer than the time that it declared" in typed.end(late).reason


def test_a_dry_run_shows_the_task_and_submits_nothing(typed: Typed) -> None:
    before = len(typed.ff("ps --state any --json").splitlines())
    options = "--array 2 --constraint fast --exclude b --nodelist a,c --after 1:ok --watchdog 90s --time 2h --nodes 2:3"
    shown = json.loads(typed.ff(f"submit --no-snapshot --dry-run {options}", "--wrap", "env 'A=b c'", "t.py", "x"))
    expected = {
        "array": 2,
        "labels": ["fast"],
        "never": ["b"],
        "only": ["a", "c"],
        "after": [{"task": 1, "ok": True}],
        "watchdog_ns": 90 * 10**9,
        "time_ns": 7200 * 10**9,
        "least_nodes": 2,
        "most_nodes": 3,
    }
    assert {key: shown[key] for key in expected} == expected
    assert (shown["program"]["wrap"], shown["program"]["args"]) == (["env", "A=b c"], ["x"])
    assert len(typed.ff("ps --state any --json").splitlines()) == before


def test_what_a_task_asks_for_in_vain_is_named(typed: Typed) -> None:
    assert "there is no task 999999" in typed.error("submit --no-snapshot --after 999999 t.py", code=1)
    for options, missing in (
        ("--nodelist agent-9", "node agent-9"),
        ("--constraint quick", "node with the label quick"),
        ("--group none", "node in group none"),
    ):
        assert f"there is no {missing}" in typed.ff(f"submit --no-snapshot --test-only {options} t.py")
    waiting = typed.submit("--nodelist agent-9")
    assert "there is no node agent-9" in typed.ff(f"show {waiting}")
    typed.ff(f"stop {waiting}")
    assert typed.client.task(waiting).task.state is not TaskState.QUEUED


def test_a_wrong_word_to_node_gets_one_line(typed: Typed) -> None:
    assert typed.error("node label agent-9 fast", code=1) == "there is no node agent-9"
    assert typed.error("node move agent-9 --zone a", code=1) == "there is no node agent-9"
    assert "LABEL: 'a b' is no name; a name begins with" in typed.error("node label agent-1", "a b")
    assert "--zone: 'a b' is no name" in typed.error("node move agent-1 --zone", "a b")
    assert "--group: '' is no name" in typed.error("node move agent-1 --group", "")
    assert "give --zone, --leaf or --group" in typed.error("node move agent-1")
    assert "REASON has 401 characters; 400 are allowed" in typed.error("node drain agent-1", "x" * 401)


def test_a_node_that_is_not_removed_keeps_its_credential(typed: Typed) -> None:
    assert "node agent-2 is heard; stop its agent first, and wait until nothing was heard for 20.0 s" in typed.error(
        "node remove agent-2", code=1
    )
    assert typed.end(typed.submit("--nodelist agent-2")).outcome is Outcome.SUCCEEDED


def test_a_machine_is_revoked_without_being_forgotten(typed: Typed) -> None:
    typed.ff("node token gpu-9")
    assert "the credential of gpu-9 is revoked" in typed.ff("node revoke gpu-9")
    assert "no machine 'gpu-9' has joined" in typed.error("node revoke gpu-9", code=1)
