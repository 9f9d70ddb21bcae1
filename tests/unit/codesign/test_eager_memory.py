"""Activations that a plan counts for the CPU, beside those of the trainer's models there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.live_memory import LiveMemory

from fireflyer.codesign.parallel import ParallelPlan, Precision, peak_memory
from fireflyer.recipes.trainer.core.recipe import DeepseekTable, GptTable, HuggingFaceTable, ModelTable
from fireflyer.recipes.trainer.models import build_model, shape_of
from fireflyer.training.recompute import recompute

SEQUENCES, TOKENS, VOCABULARY = 4, 64, 96
LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": TOKENS,
}
AUTOCAST, FP32 = Precision(parameters="fp32"), Precision(parameters="fp32", compute="fp32")
BF16 = Precision(parameters="bf16")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices are too small for several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def table(family: str, directory: Path) -> ModelTable:
    if family == "gpt":
        return GptTable(vocabulary=VOCABULARY, layers=3, heads=4, width=128)
    if family == "deepseek":
        return DeepseekTable(preset="small")
    (directory / "config.json").write_text(json.dumps(LLAMA))
    return HuggingFaceTable(config=str(directory / "config.json"))


def measure(model: ModelTable, precision: Precision, mode: Any) -> tuple[int, int]:
    """Bytes kept after forward, and the peak of a step whose gradients have their memory already."""
    built = build_model(model, context=TOKENS, device=torch.device("cpu"))
    loss_model = built.loss.train()
    if precision.parameters == "bf16":
        loss_model.bfloat16()  # as FSDP computes in it
    recompute(built.module, mode, blocks=built.blocks)
    for one in loss_model.parameters():
        one.grad = torch.zeros_like(one)
    tokens = torch.randint(0, VOCABULARY, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(0))
    with LiveMemory() as live:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is AUTOCAST):
            loss = loss_model(tokens, tokens)
        kept = live.live_bytes
        loss.backward()
    return kept, live.peak_bytes


def planned(model: ModelTable, precision: Precision, mode: Any) -> tuple[int, int]:
    plan = ParallelPlan(
        sequence_tokens=TOKENS,
        batch_sequences=SEQUENCES,
        micro_batch=SEQUENCES,
        recompute=mode,
        precision=precision,
    )
    memory = peak_memory(plan, shape_of(model), "eager")
    return memory.activations, memory.activations + memory.working


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("mode", ["none", "operators", "blocks", "full"])
@pytest.mark.parametrize("precision", [FP32, AUTOCAST], ids=["fp32", "autocast"])
@pytest.mark.parametrize("family", ["gpt", "llama", "deepseek"])
def test_planned_activations_are_within_a_tenth_of_those_measured(
    family: str, precision: Precision, mode: str, tmp_path: Path
) -> None:
    model = table(family, tmp_path)
    (kept, peak), (planned_kept, planned_peak) = measure(model, precision, mode), planned(model, precision, mode)
    assert planned_peak == pytest.approx(peak, rel=0.1)
    if mode == "full":  # beside tokens and targets, which no operator made
        batch = 2 * 8 * SEQUENCES * TOKENS
        assert kept - 64 < planned_kept - batch <= kept
        assert (planned_kept == batch) == (family == "deepseek")
    else:
        assert planned_kept == pytest.approx(kept, rel=0.03)


@pytest.mark.parametrize("family", ["gpt", "llama", "deepseek"])
def test_so_are_those_of_a_model_in_bf16(family: str, tmp_path: Path) -> None:
    model = table(family, tmp_path)
    (kept, peak), (planned_kept, planned_peak) = measure(model, BF16, "none"), planned(model, BF16, "none")
    assert planned_kept == pytest.approx(kept, rel=0.1)
    assert planned_peak == pytest.approx(peak, rel=0.1)
