"""Data of a recipe: the mixture that is trained on, the held-out sequences, and what identifies both."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from fireflyer.base.decoding import convert
from fireflyer.base.errors import NotFound, UsageError
from fireflyer.data import (
    Concatenation,
    MixtureSampler,
    MixtureState,
    PrefetchLoader,
    RecordSet,
    Source,
    TokenWindows,
)
from fireflyer.data.loader import Sample, stack
from fireflyer.recipes.trainer.core.recipe import DataSettings, EvaluationSettings

__all__ = ["DataState", "HeldOut", "TrainingData", "identity_of_records", "open_held_out", "open_training_data"]


class DataState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """State of the training data that a checkpoint keeps."""

    sampler: MixtureState
    identities: dict[str, str]
    """Digest of each source, by its name; also of those that were left out."""


class TrainingData:
    """The mixture of the recipe, and where in its stream the run is. `state_dict` and `load_state_dict` are those of
    `fireflyer.checkpoint.loop.Stateful`."""

    def __init__(self, windows: Sequence[TokenWindows], sampler: MixtureSampler, identities: dict[str, str]) -> None:
        self.sampler = sampler
        self.identities = identities
        """Digest of each source, by its name."""
        self._absent_identities: dict[str, str] = {}
        """Of sources that were left out, which the sampler goes on with when they come back."""
        self._items: Concatenation[Sample] = Concatenation(windows)
        self._loader: PrefetchLoader | None = None
        self._position = 0

    @property
    def position(self) -> int:
        """Samples that all ranks together have consumed."""
        return self._position if self._loader is None else self._loader.position

    def open(self, rank: int, world_size: int) -> None:
        """Begins to read ahead for data-parallel rank `rank` of `world_size`, from the position on."""
        self._loader = PrefetchLoader(
            self._items, self.sampler, rank=rank, world_size=world_size, position=self._position
        )

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of this rank, int64 `[sequences, tokens]` each."""
        if self._loader is None:
            raise UsageError("the training data are not open; call open(rank, world_size)")
        inputs, targets = next(self._loader).tensors
        return inputs, targets

    def close(self) -> None:
        """Joins the threads that read ahead; the position stays."""
        if self._loader is not None:
            self._position = self._loader.position
            self._loader.close()
            self._loader = None

    def go_on_at(self, position: int) -> None:
        """Goes on with the batch that begins at `position` of the stream, where the parameters went back."""
        self.close()
        self._position = position

    def state_dict(self) -> dict[str, Any]:
        identities = self._absent_identities | self.identities
        saved = DataState(sampler=self.sampler.state(self.position), identities=identities)
        state: dict[str, Any] = msgspec.to_builtins(saved)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises `UsageError` where the run was trained on other data. Sources may be added, left out, or get other
        weights."""
        try:
            saved = convert(state, DataState)
        except msgspec.ValidationError as error:
            raise UsageError(f"the checkpoint has no position in the training data: {error}") from error
        for name, digest in self.identities.items():
            if saved.identities.get(name, digest) != digest:
                raise UsageError(
                    f"source {name!r} has other records than when the run was saved; give it the same data, or give "
                    "the changed data another name"
                )
        self.close()
        self._position = self.sampler.resume(saved.sampler)
        self._absent_identities = {
            name: digest for name, digest in saved.identities.items() if name not in self.identities
        }


@dataclass(frozen=True, slots=True)
class HeldOut:
    """First sequences of one held-out source."""

    name: str
    identity: str
    windows: TokenWindows
    sequences: int

    def batches(self, size: int) -> Iterator[tuple[int, range]]:
        """Numbers of batches, and their sequences; the last one may be smaller."""
        for number, first in enumerate(range(0, self.sequences, size)):
            yield number, range(first, min(first + size, self.sequences))

    def read(self, sequences: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64 `[sequences, tokens]`."""
        inputs, targets = stack(self.windows.__getitems__(sequences))
        return inputs, targets


def open_training_data(
    settings: DataSettings, *, sequence_tokens: int, batch_sequences: int, vocabulary: int
) -> TrainingData:
    """Raises `UsageError`, `NotFound`, `DataCorruption`."""
    windows, sources, identities = [], [], {}
    for one in settings.sources:
        records = _records(one.name, one.path)
        part = TokenWindows(records, sequence_tokens, vocab_size=min(vocabulary, 1 << 16))
        windows.append(part)
        sources.append(Source(one.name, len(part), one.weight))
        identities[one.name] = identity_of_records(records)
    sampler = MixtureSampler(sources, global_batch=batch_sequences, seed=settings.seed)
    return TrainingData(windows, sampler, identities)


def open_held_out(
    settings: DataSettings, evaluation: EvaluationSettings, *, sequence_tokens: int, vocabulary: int
) -> list[HeldOut]:
    """In the order of the recipe. Raises as `open_training_data`."""
    found = []
    for one in settings.evaluation:
        records = _records(one.name, one.path)
        windows = TokenWindows(records, sequence_tokens, vocab_size=min(vocabulary, 1 << 16))
        found.append(HeldOut(one.name, identity_of_records(records), windows, min(evaluation.sequences, len(windows))))
    return found


def identity_of_records(records: RecordSet) -> str:
    """Digest of what the manifest says of each shard: records, bytes and checksums of indexes, which cover the
    checksums of records."""
    body = msgspec.json.encode([msgspec.to_builtins(shard) for shard in records.shards])
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def _records(name: str, path: str) -> RecordSet:
    try:
        return RecordSet(path)
    except NotFound as error:
        raise NotFound(f"source {name!r}: {error.message}") from error
