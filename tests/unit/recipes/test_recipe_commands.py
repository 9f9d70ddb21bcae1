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

from fireflyer.cli.main import main
from fireflyer.recipes.corpus import Corpus
from fireflyer.recipes.soak import run as soak_run
from fireflyer.recipes.soak.facts import SoakFacts
from fireflyer.recipes.testbed.reference import (
    cache_key,
    code_digest,
    encode_cached,
    processor,
    releases,
    undisturbed_runs,
)
from fireflyer.recipes.whole import run as whole_run
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


WRONG_DEMOS: dict[str, tuple[Callable[[Facts], Facts], str]] = {
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
