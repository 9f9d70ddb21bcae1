"""Record shards, tokenizers, the resumable sampler and the prefetching loader.

From file to tensor: `RecordSetWriter` -> shards and a manifest -> `RecordSet` -> `TokenWindows` -> `PrefetchLoader`,
which asks a `ResumableSampler` or a `MixtureSampler` which samples come next. Only the last two steps need torch; they
are imported on use. `RecordLoader` gives batches of bytes without it. Paths are directories or `ff://…`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fireflyer.data.concatenation import Concatenation
from fireflyer.data.mixture import MixtureSampler, MixtureState, Source
from fireflyer.data.prefetch import RecordBatch, RecordLoader
from fireflyer.data.recordset import RecordSet
from fireflyer.data.recordset_writer import RecordSetWriter
from fireflyer.data.sampler import ResumableSampler, SamplerState
from fireflyer.data.shard_format import ShardInfo
from fireflyer.data.shard_reader import ShardReader
from fireflyer.data.shard_writer import ShardWriter
from fireflyer.data.tokenizer import END_OF_TEXT, BpeTokenizer, ByteTokenizer

if TYPE_CHECKING:
    from fireflyer.data.loader import Batch, PrefetchLoader
    from fireflyer.data.windows import TokenWindows

__all__ = [
    "END_OF_TEXT",
    "Batch",
    "BpeTokenizer",
    "ByteTokenizer",
    "Concatenation",
    "MixtureSampler",
    "MixtureState",
    "PrefetchLoader",
    "RecordBatch",
    "RecordLoader",
    "RecordSet",
    "RecordSetWriter",
    "ResumableSampler",
    "SamplerState",
    "ShardInfo",
    "ShardReader",
    "ShardWriter",
    "Source",
    "TokenWindows",
]


def __getattr__(name: str) -> Any:
    if name in ("Batch", "PrefetchLoader"):
        from fireflyer.data import loader

        return getattr(loader, name)
    if name == "TokenWindows":
        from fireflyer.data.windows import TokenWindows

        return TokenWindows
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
