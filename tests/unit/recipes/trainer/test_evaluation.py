"""Held-out losses do not depend on how many ranks compute them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.trainer.recipes import raw_recipe, write_tokens

from fireflyer.base.errors import DataCorruption, NotFound, UsageError
from fireflyer.recipes.trainer import evaluation
from fireflyer.recipes.trainer.core.figures import SourceLoss
from fireflyer.recipes.trainer.core.parsing import recipe_of
from fireflyer.recipes.trainer.core.recipe import resolved
from fireflyer.recipes.trainer.sources import TrainingData, open_held_out, open_training_data


class Rank:
    """One of several ranks of a group, without the others: what it would add to a sum is kept."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks


def losses(
    base: Path, ranks: int, monkeypatch: pytest.MonkeyPatch, *, last: float = 1.0
) -> tuple[list[tuple[SourceLoss, ...]], list[list[torch.Size]]]:
    """What each of `ranks` ranks finds, and the shapes that it computed. The loss of a batch of two is times `last`."""
    recipe = resolved(recipe_of(raw_recipe()), str(base))
    sources = open_held_out(recipe.data, recipe.evaluation, sequence_tokens=16, vocabulary=64)
    sources *= 2  # a second source of the same name, in its place of the order
    addends: list[list[torch.Tensor]] = []
    shapes: list[list[torch.Size]] = []

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        shapes[-1].append(inputs.shape)
        return float((inputs * 0.1 + targets * 0.01).double().sum()) * (last if len(inputs) == 2 else 1.0)

    def of_all(summing: Any) -> list[tuple[SourceLoss, ...]]:
        monkeypatch.setattr("torch.distributed.all_reduce", summing)
        found = []
        for rank in range(ranks):
            addends.append([])
            shapes.append([])
            group: Any = Rank(rank, ranks)
            found.append(evaluation.evaluate(sources, loss_of, batch=5, group=group))
        return found

    of_all(lambda sums, group: addends[-1].append(sums.clone()))
    totals = [torch.stack(each).sum(0) for each in zip(*addends, strict=True)]
    shapes.clear()
    turn = iter(totals * ranks)
    return of_all(lambda sums, group: sums.copy_(next(turn))), shapes


def test_losses_are_the_same_bits_at_any_number_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokens(tmp_path)
    (alone,), _ = losses(tmp_path, 1, monkeypatch)
    assert [(one.name, one.tokens) for one in alone] == [("held", 12 * 16)] * 2
    for ranks in (2, 3, 4):
        found, shapes = losses(tmp_path, ranks, monkeypatch)
        assert found == [alone] * ranks
        # 12 sequences are batches of 5, 5 and 2, and all ranks compute equally often, as a sharded model needs.
        assert len({len(each) for each in shapes}) == 1


@pytest.mark.parametrize("last", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_none_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: float
) -> None:
    write_tokens(tmp_path)
    for ranks in (1, 2):
        found, _ = losses(tmp_path, ranks, monkeypatch, last=last)
        assert [[one.loss for one in each] for each in found] == [[None, None]] * ranks


def opened(base: Path, **tables: Any) -> TrainingData:
    recipe = resolved(recipe_of(raw_recipe(**tables)), str(base))
    return open_training_data(recipe.data, sequence_tokens=16, batch_sequences=8, vocabulary=64)


def test_the_mixture_goes_on_where_it_was_saved_for_any_number_of_ranks(tmp_path: Path) -> None:
    write_tokens(tmp_path)
    data = opened(tmp_path)
    data.open(0, 1)
    data.next_batch()
    state = data.state_dict()
    wanted = data.next_batch()[0]
    data.close()
    assert data.position == 16
    parts = []
    for rank in range(2):
        other = opened(tmp_path)
        other.load_state_dict(state)
        other.open(rank, 2)
        parts.append(other.next_batch()[0])
        other.close()
    assert torch.equal(torch.cat(parts), wanted)


def test_other_records_under_a_name_are_refused_and_a_new_name_is_not(tmp_path: Path) -> None:
    write_tokens(tmp_path)
    write_tokens(tmp_path / "changed", ("b", "a"))
    state = opened(tmp_path).state_dict()
    changed = {"sources": [{"name": "a", "path": "changed/a"}, {"name": "b", "path": "b"}]}
    with pytest.raises(UsageError, match="source 'a' has other records than when the run was saved"):
        opened(tmp_path, data=changed).load_state_dict(state)
    added = {"sources": [{"name": "a", "path": "a"}, {"name": "c", "path": "changed/a"}]}
    opened(tmp_path, data=added).load_state_dict(state)


def test_a_source_that_comes_back_must_have_the_records_of_before(tmp_path: Path) -> None:
    """It goes on where it was, also after a run that was without it."""
    write_tokens(tmp_path)
    write_tokens(tmp_path / "changed", ("b", "a"))
    without = {"sources": [{"name": "a", "path": "a"}]}
    state = opened(tmp_path).state_dict()
    for _ in range(2):
        between = opened(tmp_path, data=without)
        between.load_state_dict(state)
        state = between.state_dict()
    back = {"sources": [{"name": "a", "path": "a"}, {"name": "b", "path": "changed/b"}]}
    with pytest.raises(UsageError, match="source 'b' has other records than when the run was saved"):
        opened(tmp_path, data=back).load_state_dict(state)
    opened(tmp_path).load_state_dict(state)


@pytest.mark.parametrize("state", [{}, {"sampler": 1}, {"sampler": {"seed": 1}, "identities": {}}])
def test_a_state_of_another_program_is_refused(tmp_path: Path, state: dict[str, Any]) -> None:
    write_tokens(tmp_path)
    with pytest.raises(UsageError, match="has no position in the training data"):
        opened(tmp_path).load_state_dict(state)


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="source 'a'"):
        opened(tmp_path)


def test_checkpoints_of_before_say_nothing_of_held_out_records(tmp_path: Path) -> None:
    write_tokens(tmp_path)
    recipe = resolved(recipe_of(raw_recipe()), str(tmp_path))
    sources = open_held_out(recipe.data, recipe.evaluation, sequence_tokens=16, vocabulary=64)
    values: dict[str, Any] = {"expert_loads": {}}
    for _ in range(2):
        evaluation.note_held_out(values, sources)
        assert values == {"expert_loads": {}, evaluation.HELD_OUT: {"held": sources[0].identity}}
    for wrong in (["held"], {"held": 1}):
        with pytest.raises(DataCorruption, match="held_out of the checkpoint is no table of digests"):
            evaluation.note_held_out({evaluation.HELD_OUT: wrong}, sources)
