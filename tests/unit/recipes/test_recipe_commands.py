"""`ff demo --whole` and `ff soak` as commands: exit code 1, and the check by name, where what was seen differs.

Everything is real but corpus and platform: what the stage of a recipe would have seen is given, once as it must be and
then with a difference in it. With a platform: tests/e2e/platform/test_soak.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.jobs.soak_facts import SOAK, good_soak
from tests.support.jobs.whole_facts import PLAN, good_facts

from fireflyer.base.events import JobEvent, ResumeReport, StepReport
from fireflyer.cli.main import main
from fireflyer.recipes.corpus import Corpus
from fireflyer.recipes.soak import run as soak_run
from fireflyer.recipes.soak.facts import SoakFacts
from fireflyer.recipes.testbed.facts import RunFacts
from fireflyer.recipes.testbed.reference import (
    cache_key,
    code_digest,
    encode_cached,
    processor,
    releases,
    undisturbed_runs,
)
from fireflyer.recipes.whole import run as whole_run
from fireflyer.recipes.whole.checks import judge
from fireflyer.recipes.whole.facts import Facts

change = msgspec.structs.replace
Seen = Callable[[Any], None]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Gives the facts that the stages of both recipes have seen."""

    @contextlib.contextmanager
    def no_cluster(*_: object) -> Iterator[None]:
        yield None

    def see(facts: Any) -> None:
        for module in (whole_run, soak_run):
            monkeypatch.setattr(module, "running_cluster", no_cluster)
            monkeypatch.setattr(module, "build_corpus", lambda *_, **__: "no corpus")
            monkeypatch.setattr(module, "undisturbed_runs", lambda *_: facts.references)
            monkeypatch.setattr(module._Stage, "perform", lambda *_: facts)
        monkeypatch.setattr("fireflyer.cli.jobs.whole_demo.WholePlan", lambda: PLAN)

    return see


def demo(directory: Path) -> int:
    return main(["demo", "--whole", "--directory", str(directory)])


def soak(directory: Path, *options: str) -> int:
    return main(["soak", "--seed", str(SOAK.seed), "--minutes", "1", "--directory", str(directory), *options])


def other_loss(facts: Facts) -> Facts:
    """The undisturbed loss of one step is the next number up."""
    first = facts.references["first"]
    losses = {**first.losses, 35: math.nextafter(first.losses[35], math.inf)}
    return change(facts, references={**facts.references, "first": change(first, losses=losses)})


def other_task(name: str, **values: Any) -> Callable[[Facts], Facts]:
    return lambda facts: change(
        facts, tasks=tuple(change(task, **values) if task.name == name else task for task in facts.tasks)
    )


def other_fault(kind: str, **values: Any) -> Callable[[Facts], Facts]:
    return lambda facts: change(
        facts, faults=tuple(change(one, **values) if one.kind == kind else one for one in facts.faults)
    )


def failed_read(facts: Facts) -> Facts:
    at = next(number for number, one in enumerate(facts.operations) if one.kind == "read")
    broken = change(facts.operations[at], error="/traffic/0 does not hold what was written last")
    return change(facts, operations=(*facts.operations[:at], broken, *facts.operations[at + 1 :]))


def older_start(facts: Facts) -> Facts:
    """The first task went on from the last checkpoint but one after its node was killed."""

    def older(event: JobEvent) -> JobEvent:
        meant = isinstance(event, ResumeReport) and event.attempt == 1
        return change(event, step=20, checkpoint="step-00000020") if meant else event

    task = facts.tasks[0]
    runs = tuple(
        change(run, log=tuple(change(entry, event=older(entry.event)) for entry in run.log)) for run in task.runs
    )
    return other_task("first", runs=runs)(facts)


def moved_urgent(facts: Facts) -> Facts:
    urgent = next(task for task in facts.tasks if task.name == "urgent")
    return other_task("urgent", runs=(change(urgent.runs[0], nodes=("agent-1", "agent-2")),))(facts)


WRONG_DEMOS: dict[str, tuple[Callable[[Facts], Facts], str]] = {
    "tasks": (other_task("second", outcome="failed"), "second"),
    "starts": (older_start, "went on from step 20"),
    "storage node": (other_fault("storage", killed=0), "no process of the storage node"),
    "storage traffic": (failed_read, "/traffic/0 does not hold"),
    "compute node": (other_fault("node", killed=1), "1 processes of"),
    "interruption": (moved_urgent, "urgent did not get the nodes"),
    "losses": (other_loss, "task first: rank 0, step 35"),
    "files": (lambda facts: change(facts, stored=facts.stored[1:]), "/traffic/0"),
    "course": (lambda facts: change(facts, trouble=("waited 600 s for a run",)), "waited 600 s for a run"),
    "checkpoints": (lambda facts: change(facts, shards={**facts.shards, "urgent": {}}), "urgent"),
}


def test_a_demonstration_in_which_all_is_well_ends_with_0(
    tmp_path: Path, seen: Seen, capsys: pytest.CaptureFixture[str]
) -> None:
    seen(good_facts())
    assert demo(tmp_path) == 0
    said = capsys.readouterr()
    assert "The whole demonstration · Succeeded" in said.out
    assert "error:" not in said.err
    assert (tmp_path / "report.html").exists()
    assert msgspec.json.decode((tmp_path / "facts.json").read_bytes(), type=Facts) == good_facts()


def lines_of(said: str, section: str) -> list[str]:
    """Of a section of the report: from its title to an empty line."""
    lines = said.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(section))
    return lines[begin + 1 : lines.index("", begin)]


def test_the_terminal_shows_losses_of_each_task_beside_the_undisturbed_ones(
    tmp_path: Path, seen: Seen, capsys: pytest.CaptureFixture[str]
) -> None:
    seen(good_facts())
    assert demo(tmp_path) == 0
    lines = lines_of(capsys.readouterr().out, "Loss")
    assert [line.split()[0] for line in lines[::3]] == ["first", "second", "urgent"]
    for under, over in zip(lines[1::3], lines[2::3], strict=True):
        assert under.startswith("  undisturbed █")
        assert over.startswith("  as it ran   █")
        assert under[14:] == over[14:]
    assert lines[0].index("↻") - 14 == 30, "the first task went on with step 31"
    assert lines[3].index("↻") - 14 == 25
    assert "↻" not in lines[6]
    assert lines[1].endswith("  5.941 to 3.750")


def test_the_terminal_shows_where_a_task_that_differs_does(
    tmp_path: Path, seen: Seen, capsys: pytest.CaptureFixture[str]
) -> None:
    """A task that has reported nothing behind a step, and one whose losses stay where they were."""
    facts = good_facts()
    losses = dict.fromkeys(range(1, 61), 5.0)
    flat = change(facts.references["second"], losses=losses)
    short = change(facts.tasks[0], runs=(cut(facts.tasks[0].runs[0], 20),))
    seen(change(facts, tasks=(short, *facts.tasks[1:]), references={**facts.references, "second": flat}))
    assert demo(tmp_path) == 1
    lines = lines_of(capsys.readouterr().out, "Loss")
    assert lines[2][14:74] == lines[1][14:34] + " " * 40, "20 steps, and then nothing"
    assert lines[4][14:74] == lines[4][14] * 60
    assert lines[5][14] > lines[5][73]


def cut(run: RunFacts, last: int) -> RunFacts:
    """Without what was reported of later steps."""
    log = tuple(one for one in run.log if not isinstance(one.event, StepReport) or one.event.step <= last)
    return change(run, log=log)


def test_the_terminal_shows_the_storage_in_time_with_the_failure(
    tmp_path: Path, seen: Seen, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node is dead from second 2, counts as failed from 8, and every chunk has all replicas again at 11, of 20."""
    seen(good_facts())
    assert demo(tmp_path) == 0
    heads, writes, reads, degraded = lines_of(capsys.readouterr().out, "Storage in time")
    cell = 78 / 20
    assert heads[14:].index("1") == int(2 * cell)
    for line in (writes, reads):
        assert line[14 : 14 + int(1.5 * cell)] == "█" * int(1.5 * cell)
        assert line[14 + int(3 * cell) : 14 + int(7 * cell)] == "▁" * (int(7 * cell) - int(3 * cell))
        assert line[14 + int(9 * cell) : 14 + 78] == "█" * (78 - int(9 * cell))
        assert line.endswith("at most 4.0 MiB/s")
    bad = degraded[14 : 14 + 78]
    assert (bad.index("▒"), bad.rindex("▒")) == (int(8 * cell), int(11 * cell))


def test_a_difference_is_planted_for_each_check() -> None:
    assert set(WRONG_DEMOS) == {check.name for check in judge(PLAN, good_facts())}


@pytest.mark.parametrize("check", WRONG_DEMOS)
@pytest.mark.parametrize("quiet", [False, True])
def test_a_demonstration_with_a_difference_ends_with_1_and_names_the_check(
    check: str, quiet: bool, tmp_path: Path, seen: Seen, capsys: pytest.CaptureFixture[str]
) -> None:
    alter, text = WRONG_DEMOS[check]
    seen(alter(good_facts()))
    assert main(["demo", "--whole", "--directory", str(tmp_path), *(["--quiet"] if quiet else [])]) == 1
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith(f"error: {check}: ")
    assert text in line
    assert ("The whole demonstration · Failed" in said.out) is not quiet
    assert "Failed" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("off", [False, True])
def test_losses_are_compared_with_those_of_the_undisturbed_runs_that_are_on_disk(
    off: bool, tmp_path: Path, seen: Seen, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where undisturbed runs were computed earlier, the stage gets what is in their files."""
    facts = good_facts()
    seen(facts)
    monkeypatch.setattr(whole_run, "undisturbed_runs", undisturbed_runs)
    corpus = Corpus(directory="", fingerprint="of tests", files=1, source_bytes=1, tokens=1, vocab_size=1, build_ns=1,
                    reused=True)  # fmt: skip
    monkeypatch.setattr(whole_run, "build_corpus", lambda *_, **__: corpus)
    monkeypatch.setattr(whole_run._Stage, "perform", lambda stage, *_: change(facts, references=stage._references))
    place = tmp_path / "undisturbed"
    place.mkdir()
    code, features = code_digest(), processor()
    for task in PLAN.all_tasks:
        reference = (other_loss(facts) if off else facts).references[task.name]
        key = cache_key(PLAN, task, code=code, releases=releases(), processor=features, corpus=corpus.fingerprint)
        (place / f"{task.name}-{key}.json").write_bytes(encode_cached(reference.losses, reference.shards))
    assert demo(tmp_path) == int(off)
    assert ("error: losses: " in capsys.readouterr().err) is off


def wrong_read(facts: SoakFacts) -> SoakFacts:
    first, *others = facts.writers
    return change(facts, writers=(change(first, wrong_reads=("append: byte 7",)), *others))


WRONG_SOAKS: dict[str, tuple[Callable[[SoakFacts], SoakFacts], str]] = {
    "files": (lambda facts: change(facts, stored=facts.stored[1:]), "/soak/append/0"),
    "fsck": (lambda facts: change(facts, fsck_code=1, fsck=("chunk 5 is of no file",)), "chunk 5 is of no file"),
    "writers": (wrong_read, "append: byte 7"),
    "faults": (lambda facts: change(facts, trouble=("waited 600 s",)), "waited 600 s"),
    "storage": (lambda facts: change(facts, storage=None), "not all storage nodes live"),
}


def test_a_soak_in_which_all_is_well_ends_with_0(
    tmp_path: Path, seen: Seen, capsys: pytest.CaptureFixture[str]
) -> None:
    seen(good_soak())
    assert soak(tmp_path) == 0
    said = capsys.readouterr()
    assert "Soak · Succeeded" in said.out
    assert "error:" not in said.err


@pytest.mark.parametrize("check", WRONG_SOAKS)
def test_a_soak_with_a_difference_ends_with_1_and_says_how_to_have_it_again(
    check: str, tmp_path: Path, seen: Seen, capsys: pytest.CaptureFixture[str]
) -> None:
    alter, text = WRONG_SOAKS[check]
    seen(alter(good_soak()))
    assert soak(tmp_path) == 1
    said = capsys.readouterr()
    assert "Soak · Failed" in said.out
    wrong, again = said.err.splitlines()
    assert wrong.startswith(f"error: {check}: ")
    assert text in wrong
    assert f"again: ff soak --minutes 1 --seed {SOAK.seed}" in again
    report = msgspec.json.decode((tmp_path / "report.json").read_bytes())
    assert [one["name"] for one in report["checks"] if not one["good"]] == [check]
