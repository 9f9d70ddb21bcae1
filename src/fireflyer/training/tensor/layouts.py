"""`TensorLayout`: which modules of a model tensor parallelism divides, and how; and what a degree does not divide.

A column-parallel matrix is divided by outputs: each rank computes some heads or inner values. The row-parallel matrix
behind it is divided by inputs, and its results are added over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, cast

from torch import nn

from fireflyer.base.errors import UsageError

__all__ = ["GPT_LAYOUT", "LLAMA_LAYOUT", "TensorLayout", "blocks_of", "layout_of", "refusals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """Names of the modules of a decoder-only transformer. Those of a block are relative to it."""

    embedding: str
    """Divided by rows of the vocabulary."""
    blocks: str
    """A `ModuleList` of equal blocks."""
    norms: tuple[str, ...]
    """Whole on each rank."""
    inputs: tuple[str, ...]
    """Modules whose input, the first or that named `hidden_states`, is gathered before them: those of columns, or what
    contains several with one input."""
    columns: tuple[str, ...]
    fused: tuple[tuple[str, int], ...] = ()
    """Column-parallel matrices of several stacked parts (query, key, value), and the number of parts. Each part is
    divided by itself."""
    rows: tuple[str, ...]
    final_norm: str
    head: str | None
    """None: the model multiplies by the weight of its embedding."""
    targets: str | None
    """Name of the second argument of the model, whole on each rank, if its loss is in it."""
    heads: tuple[str, ...]
    """Fields of `model.config` with counts of attention heads that must divide."""


GPT_LAYOUT: Final = TensorLayout(
    embedding="embedding",
    blocks="blocks",
    norms=("attention_norm", "mlp_norm"),
    inputs=("mlp_in",),
    columns=("mlp_in",),
    fused=(("attention_in", 3),),
    rows=("attention_out", "mlp_out"),
    final_norm="norm",
    head=None,
    targets="targets",
    heads=("heads",),
)
"""Of `fireflyer.recipes.GPTModel`."""

LLAMA_LAYOUT: Final = TensorLayout(
    embedding="model.embed_tokens",
    blocks="model.layers",
    norms=("input_layernorm", "post_attention_layernorm"),
    inputs=("self_attn", "mlp"),
    columns=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
    rows=("self_attn.o_proj", "mlp.down_proj"),
    final_norm="model.norm",
    head="lm_head",
    targets=None,
    heads=("num_attention_heads", "num_key_value_heads"),
)
"""Of `transformers.LlamaForCausalLM`."""

_BY_CLASS: Final = {"GPTModel": GPT_LAYOUT, "LlamaForCausalLM": LLAMA_LAYOUT}


def layout_of(model: nn.Module) -> TensorLayout:
    """That of a known class of models. Raises `UsageError`."""
    found = _BY_CLASS.get(type(model).__name__)
    if found is None:
        raise UsageError(
            f"tensor parallelism of {type(model).__name__} is not known, only of {', '.join(sorted(_BY_CLASS))}; "
            "describe its modules by layout=TensorLayout(...)"
        )
    return found


def blocks_of(model: nn.Module, layout: TensorLayout) -> tuple[nn.Module, ...]:
    """The blocks of `model`, in order."""
    return tuple(cast("nn.ModuleList", model.get_submodule(layout.blocks)))


def refusals(model: nn.Module, layout: TensorLayout, tensor: int) -> list[str]:
    """Why `model` cannot be divided over `tensor` ranks: each reason with its numbers; empty if it can."""
    return [*_heads(model, layout, tensor), *_matrices(model, layout, tensor)]


def _heads(model: nn.Module, layout: TensorLayout, tensor: int) -> Iterator[str]:
    for name in layout.heads:
        count = getattr(model.config, name)
        if count % tensor:
            yield f"{name} = {count} does not divide into tensor = {tensor} parts"


def _matrices(model: nn.Module, layout: TensorLayout, tensor: int) -> Iterator[str]:
    embedding = model.get_submodule(layout.embedding)
    vocabulary = cast("nn.Embedding", embedding).num_embeddings
    if vocabulary % tensor:
        yield (
            f"a vocabulary of {vocabulary} does not divide into tensor = {tensor} parts; "
            f"pad it to {vocabulary + -vocabulary % tensor}"
        )
    blocks = blocks_of(model, layout)
    if not blocks:
        yield f"{layout.blocks} is empty; there is nothing to divide"
        return
    for name in layout.columns:
        yield from _divides(blocks[0], name, "out_features", tensor)
    for name, parts in layout.fused:
        yield from _divides(blocks[0], name, "out_features", parts * tensor)
    for name in layout.rows:
        yield from _divides(blocks[0], name, "in_features", tensor)


def _divides(block: nn.Module, name: str, field: str, parts: int) -> Iterator[str]:
    module = block.get_submodule(name)
    if not isinstance(module, nn.Linear):
        yield f"{name} is a {type(module).__name__}; only nn.Linear is divided"
    elif getattr(module, field) % parts:
        yield f"{field} = {getattr(module, field)} of {name} does not divide into {parts} parts"
