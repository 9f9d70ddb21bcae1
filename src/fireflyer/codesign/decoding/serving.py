"""A service that decodes: speculation with prediction modules, and GPUs divided into prefill and decoding."""

from __future__ import annotations

from typing import NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.codesign.decoding.memory import CacheFormat, cache_bytes
from fireflyer.codesign.model import ModelShape, training_flops

__all__ = ["Split", "prefill_rate", "speculation_gain", "split_gpus"]


def speculation_gain(acceptance: float, modules: int = 1, *, module_cost: float = 0.0) -> float:
    """Tokens per second over those without: a step yields the next token and those of `modules` predicted ones that are
    accepted, each with probability `acceptance` if the one before it was; each module makes it longer by `module_cost`
    of a step. Raises `UsageError`.

    >>> round(speculation_gain(0.85, module_cost=1 / 61), 2)        # DeepSeek-V3 paper, 2.3.3: 80 to 90 %, 1.8 times
    1.82
    """
    if not 0 <= acceptance <= 1 or modules < 0 or module_cost < 0:
        raise UsageError(f"{modules} modules accepted with {acceptance}; give 0 to 1, and no negative numbers")
    return sum(acceptance**one for one in range(modules + 1)) / (1 + modules * module_cost)


def prefill_rate(shape: ModelShape, prompt: int, flops: float) -> float:
    """Prompt tokens per second of a GPU that delivers `flops` per second: a forward pass is a third of training. Raises
    `UsageError`."""
    if not flops > 0:
        raise UsageError(f"a GPU with {flops} FLOPs per second; use more than 0")
    return flops / (training_flops(shape, prompt) / 3)


class Split(NamedTuple):
    """Division of GPUs into two pools, such that neither waits (DeepSeek-V3 paper, 2.3.1)."""

    prefill_share: float
    """Share of all GPUs that do prefill, 0 to 1."""
    requests_per_s: float
    """Requests per second, over the number of GPUs of both pools."""
    cache_bytes: float
    """Bytes of KV cache that each request moves from the prefill pool to the decoding pool."""
    cache_bytes_per_s: float
    """Bytes of KV cache per second that a GPU of the prefill pool sends on."""


def split_gpus(
    shape: ModelShape, prompt: int, answer: int, *, prefill_per_s: float, decode_per_s: float, cache: CacheFormat
) -> Split:
    """Divide GPUs for requests of `prompt` tokens that get `answer` tokens; rates are tokens per second of one GPU.
    Raises `UsageError`."""
    if prompt < 1 or answer < 1 or not (prefill_per_s > 0 and decode_per_s > 0):
        raise UsageError(f"{prompt} and {answer} tokens at {prefill_per_s} and {decode_per_s} per s; use more than 0")
    prefill_s, decode_s = prompt / prefill_per_s, answer / decode_per_s
    moved = cache_bytes(shape, prompt, cache)
    return Split(prefill_s / (prefill_s + decode_s), 1 / (prefill_s + decode_s), moved, moved / prefill_s)
