"""Published figures about models: KV cache, FLOPs, MFU, decoding limits, scaling. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from fireflyer.codesign.model import (
    ModelShape,
    dense_flops,
    kv_bytes_per_token,
    model_flops_utilization,
    training_flops,
)
from fireflyer.planning.published.figure import PublishedFigure, row
from fireflyer.planning.published.networks import FIRE_FLYER, V3

__all__ = ["decoding", "kv_cache", "scaling", "training_cost", "v3_metrics"]

SEQUENCE_TOKENS = 4096


def kv_cache(shapes: Mapping[str, ModelShape]) -> PublishedFigure:
    published = {"deepseek-v3": 70.272, "qwen-2.5-72b": 327.680, "llama-3.1-405b": 516.096}
    rows = tuple(
        row(
            f"{name}, BF16",
            kilobytes,
            kv_bytes_per_token(shapes[name]) / 1000,
            "bytes of a token in all layers / 1000",
            unit="KB",
            step=0.001,
        )
        for name, kilobytes in published.items()
    )
    return PublishedFigure("v3-table-1", "KV cache of a token", f"{V3}, table 1", rows)


def training_cost(shapes: Mapping[str, ModelShape]) -> PublishedFigure:
    active = "6 x active matrix parameters with the head, and causal attention"
    dense = "6 (12 L h^2 + V h): no attention scores, no grouped heads"
    rows = [
        row(name, published, training_flops(shapes[name], SEQUENCE_TOKENS) / 1e9, active, unit="GFLOPs/token")
        for name, published in (("deepseek-v2", 155), ("deepseek-v3", 250))
    ]
    for name, published in (("qwen-2.5-72b", 394), ("llama-3.1-405b", 2448)):
        rows.append(row(name, published, dense_flops(shapes[name]) / 1e9, dense, unit="GFLOPs/token"))
        rows.append(
            row(
                f"{name}, counted as the others",
                published,
                training_flops(shapes[name], SEQUENCE_TOKENS) / 1e9,
                f"{active}: the table counts its dense rows by another formula",
                unit="GFLOPs/token",
            )
        )
    return PublishedFigure("v3-table-2", "training FLOPs of a token", f"{V3}, table 2", tuple(rows))


def v3_metrics(shapes: Mapping[str, ModelShape]) -> PublishedFigure:
    step_s, gpus, peak = 19.926, 2048, 989e12
    tokens = 15360 * SEQUENCE_TOKENS
    rate = tokens / step_s
    causal = training_flops(shapes["deepseek-v3"], SEQUENCE_TOKENS)
    whole = training_flops(shapes["deepseek-v3"], SEQUENCE_TOKENS, causal=False)
    parts = 1.13 + 2.06 + 1.99 + 0.48 + 13.95 + 0.29
    how = "15,360 x 4,096 tokens in 19.926 s on 2,048 GPUs"
    return PublishedFigure(
        "v3-table-4",
        "training of DeepSeek-V3 over the multi-plane network",
        f"{V3}, table 4",
        (
            row("tokens of a day", 272.80, rate * 86400 / 1e9, how, unit="B", step=0.01),
            row(
                "time of a step from its parts",
                19.926,
                parts,
                "the sum of six parts, each rounded to 0.01 s",
                unit="s",
                step=0.06,
            ),
            row("TFLOPS, non-causal", 432, whole * rate / gpus / 1e12, how, unit="TFLOPS", printed="cut"),
            row("TFLOPS, causal", 385, causal * rate / gpus / 1e12, how, unit="TFLOPS"),
            row(
                "MFU, non-causal",
                43.73,
                100 * model_flops_utilization(whole, rate, gpus, peak),
                "of 989 TFLOPS",
                unit="%",
                step=0.01,
            ),
            row(
                "MFU, causal",
                38.94,
                100 * model_flops_utilization(causal, rate, gpus, peak),
                "of 989 TFLOPS",
                unit="%",
                step=0.01,
            ),
        ),
    )


def decoding() -> PublishedFigure:
    """Bytes of FP8 dispatch and BF16 combine, 32 tokens to 9 experts, hidden 7,000 as the paper rounds 7,168."""

    def layer_s(bytes_per_s: float) -> float:
        return (1 + 2) * 32 * 9 * 7000 / bytes_per_s

    infiniband, nvlink = layer_s(50e9), layer_s(900e9)
    return PublishedFigure(
        "v3-decoding",
        "decoding limits of expert parallelism",
        f"{V3}, 2.3.2",
        (
            row(
                "communication of a layer at 50 GB/s",
                120.96,
                infiniband * 1e6,
                "3 bytes x 32 x 9 x 7,000",
                unit="us",
                step=0.01,
            ),
            row(
                "time of an output token",
                14.76,
                2 * 61 * infiniband * 1e3,
                "61 layers, two micro-batches",
                unit="ms",
                step=0.01,
            ),
            row("tokens per second", 67, 1 / (2 * 61 * infiniband), "67.75; the paper cuts it off", printed="cut"),
            row(
                "tokens per second with 7,168 instead of 7,000",
                67,
                7000 / 7168 / (2 * 61 * infiniband),
                "the hidden size is 7,168; the paper takes 7K",
            ),
            row("time of an output token at 900 GB/s", 0.82, 2 * 61 * nvlink * 1e3, "as above", unit="ms", step=0.01),
            row("tokens per second at 900 GB/s", 1200, 1 / (2 * 61 * nvlink), "'approximately 1200'", step=100),
        ),
    )


def scaling() -> PublishedFigure:
    return PublishedFigure(
        "ff-figure-9",
        "strong scaling of training",
        f"{FIRE_FLYER}, V-B and figure 9",
        (
            row(
                "LLaMa-13B, parallel efficiency 64 to 512 GPUs",
                0.91,
                64.118 / (8 * 9.717),
                "64.118 s / (8 x 9.717 s); 91 % does not follow from the printed times",
                step=0.01,
            ),
        ),
    )
