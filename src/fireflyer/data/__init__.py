"""Record shards, tokenizers, the resumable sampler and the prefetching loader.

From file to tensor: `RecordSetWriter` -> shards and a manifest -> `RecordSet` -> `TokenWindows` -> `PrefetchLoader`,
which asks a `ResumableSampler` which samples come next. Only the last two steps need torch; they are imported on use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fireflyer.data.records import ShardInfo, ShardReader, ShardWriter
from fireflyer.data.recordset import RecordSet, RecordSetWriter
from fireflyer.data.sampler import ResumableSampler, SamplerState
from fireflyer.data.tokenizer import END_OF_TEXT, BpeTokenizer, ByteTokenizer

if TYPE_CHECKING:
    from fireflyer.data.loader import Batch, PrefetchLoader
    from fireflyer.data.windows import TokenWindows

__all__ = [
    "END_OF_TEXT",
    "Batch",
    "BpeTokenizer",
    "ByteTokenizer",
    "PrefetchLoader",
    "RecordSet",
    "RecordSetWriter",
    "ResumableSampler",
    "SamplerState",
    "ShardInfo",
    "ShardReader",
    "ShardWriter",
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
