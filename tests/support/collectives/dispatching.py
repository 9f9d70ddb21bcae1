"""Random routings, and what a dispatch of them must give, said as plainly as possible."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fireflyer.collectives.dispatch import ExpertPlacement
from fireflyer.collectives.tokens import token_codec

__all__ = ["combined", "expected_rows", "random_choices", "travelled"]

Array = npt.NDArray[Any]


def random_choices(rng: np.random.Generator, tokens: int, per_token: int, experts: int, kind: str) -> Array:
    """Of the `kind` "even", "one" (all tokens choose the same), or "few" (some experts get nothing)."""
    if kind == "one":
        return np.tile(rng.permutation(experts)[:per_token], (tokens, 1))
    among = max(per_token, experts // 3) if kind == "few" else experts
    return np.array([rng.permutation(among)[:per_token] for _ in range(tokens)], np.int64).reshape(tokens, per_token)


def travelled(values: Array, codec: str, dtype: Any = np.float32) -> Array:
    """Encoded and decoded."""
    chosen = token_codec(codec)
    payload = np.empty((len(values), chosen.row_bytes(values.shape[1])), np.uint8)
    chosen.encode_rows(values, payload)
    found = np.empty(values.shape, dtype)
    chosen.decode_rows(payload, found)
    return found


def expected_rows(
    values: list[Array], choices: list[Array], weights: list[Array], placement: ExpertPlacement, rank: int, codec: str
) -> list[tuple[int, int, int, Array, Any]]:
    """(expert, source rank, token, row, weight) of each entry that arrives at `rank`, in order."""
    found = []
    for source, (rows, chosen, weight) in enumerate(zip(values, choices, weights, strict=True)):
        rows = travelled(rows, codec, rows.dtype)
        for token in range(len(rows)):
            for expert, of in zip(chosen[token], weight[token], strict=True):
                if placement.rank_of_expert[expert] == rank:
                    found.append((int(expert), source, token, rows[token], of))
    return sorted(found, key=lambda one: one[:3])


def combined(outputs: dict[int, Array], placement: ExpertPlacement, codec: str, dtype: Any) -> Array:
    """The sum of one token's outputs by expert, each of shape (1, width): as they travel, in ascending order of experts
    within a node, which is rounded, then of nodes."""
    total = None
    for node in range(placement.nodes):
        partial = None
        for expert in sorted(outputs):
            if placement.node_of_expert[expert] == node:
                row = travelled(outputs[expert], codec, dtype)
                partial = row if partial is None else partial + row
        if partial is not None:
            rounded = travelled(partial, codec, dtype)
            total = rounded if total is None else total + rounded
    assert total is not None
    return total
