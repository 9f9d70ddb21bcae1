"""Small recipes, and data for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from fireflyer.data import RecordSetWriter

__all__ = ["VOCABULARY", "raw_recipe", "write_llama", "write_tokens"]

VOCABULARY: Final = 64


def raw_recipe(**tables: Any) -> dict[str, Any]:
    """Of a tiny GPT in FP32 on the sources `a` and `b`; `tables` are laid over its own, key by key, but for a model of
    another kind, which takes its place."""
    raw: dict[str, Any] = {
        "model": {"kind": "gpt", "vocabulary": VOCABULARY, "layers": 2, "heads": 2, "width": 16},
        "data": {
            "seed": 3,
            "sources": [{"name": "a", "path": "a", "weight": 3}, {"name": "b", "path": "b"}],
            "evaluation": [{"name": "held", "path": "held"}],
        },
        "plan": {
            "sequence_tokens": 16,
            "batch_sequences": 8,
            "micro_batch": 2,
            "precision": {"parameters": "fp32", "compute": "fp32"},
        },
        "optimizer": {"steps": 8, "learning_rate": 1e-2, "warm_up_steps": 2},
        "checkpoint": {"directory": "checkpoints", "period_steps": 4},
        "evaluation": {"sequences": 12, "batch": 5},
    }
    for name, table in tables.items():
        raw[name] = table if "kind" in table else {**raw.get(name, {}), **table}
    return raw


def write_tokens(directory: Path, names: tuple[str, ...] = ("a", "b", "held"), *, records: int = 20) -> None:
    """Data sets of counting sequences modulo the vocabulary, which a tiny model learns in some steps."""
    for seed, name in enumerate(names):
        generator = np.random.default_rng(seed)
        (directory / name).mkdir(parents=True)
        writer = RecordSetWriter(str(directory / name))
        for _ in range(records):
            first, by = generator.integers(0, VOCABULARY), generator.integers(1, 4)
            writer.add(((first + by * np.arange(40)) % VOCABULARY).astype("<u2").tobytes())
        writer.commit()


def write_llama(directory: Path) -> dict[str, Any]:
    """The configuration of a tiny Llama; returns the model table of a recipe in `directory`."""
    import transformers  # takes seconds, and not every test of recipes needs it

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    config.save_pretrained(directory / "llama")
    return {"kind": "huggingface", "config": "llama/config.json", "seed": 5}
