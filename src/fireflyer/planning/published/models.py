"""Published figures about models: KV cache, FLOPs, MFU, decoding limits, scaling. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from fireflyer.codesign.decoding import (
    MACHINES,
    exchange_bytes,
    machine_seconds,
    node_limited_dispatch,
    speculation_gain,
    token_seconds,
)
from fireflyer.codesign.model import (
    ModelShape,
    count_parameters,
    dense_flops,
    kv_bytes_per_token,
    model_flops_utilization,
    training_flops,
)
from fireflyer.collectives.tokens import token_codec
from fireflyer.planning.amounts import Amount
from fireflyer.planning.published.figure import PublishedFigure, PublishedRow, row
from fireflyer.planning.published.networks import FIRE_FLYER, V3

__all__ = ["decoding", "kv_cache", "local_use", "routing", "scaling", "sizes", "training_cost", "v3_metrics"]
__all__ += ["wire_formats"]

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
    least = kv_bytes_per_token(shapes["deepseek-v3"])
    multiples = tuple(
        row(
            f"{name}, multiple of deepseek-v3",
            multiple,
            kv_bytes_per_token(shapes[name]) / least,
            f"{published[name]:.3f} KB of {published['deepseek-v3']:.3f} KB",
            step=0.01,
        )
        for name, multiple in (("qwen-2.5-72b", 4.66), ("llama-3.1-405b", 7.28))
    )
    return PublishedFigure("v3-table-1", "KV cache of a token", f"{V3}, table 1", rows + multiples)


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


def sizes(shapes: Mapping[str, ModelShape]) -> PublishedFigure:
    rows = []
    for name, total, active in (("deepseek-v2", 236, 21), ("deepseek-v3", 671, 37)):
        count = count_parameters(shapes[name])
        rows += [
            row(f"{name}, parameters", total, count.total / 1e9, "counted from its config.json", unit="B"),
            row(
                f"{name}, parameters that a token uses",
                active,
                count.active / 1e9,
                "with embedding and head; the paper cuts it off",
                unit="B",
                printed="cut",
            ),
        ]
    return PublishedFigure("v3-sizes", "parameters of sparse models", f"{V3}, 2.2.1", tuple(rows))


def wire_formats() -> PublishedFigure:
    """Of a token of 7,168 values, as the codecs of tokens send it."""
    bf16, fp8 = (token_codec(name).row_bytes(7168) for name in ("bf16", "fp8"))
    return PublishedFigure(
        "v3-formats",
        "bytes of a token on the wire",
        f"{V3}, 3.2",
        (
            row("saved by FP8 dispatch", 50, 100 * (1 - 7168 / bf16), "1 byte of 2, without scales", unit="%"),
            row(
                "saved by FP8 dispatch with its scales",
                50,
                100 * (1 - fp8 / bf16),
                f"{fp8:,} bytes of {bf16:,}: an FP32 scale for each 128 values is not counted in the 50 %",
                unit="%",
            ),
        ),
    )


def v3_metrics(shapes: Mapping[str, ModelShape]) -> PublishedFigure:
    step_s, gpus, peak = 19.926, 2048, 989e12
    tokens = 15360 * SEQUENCE_TOKENS
    rate = tokens / step_s
    causal = training_flops(shapes["deepseek-v3"], SEQUENCE_TOKENS)
    whole = training_flops(shapes["deepseek-v3"], SEQUENCE_TOKENS, causal=False)
    parts = _sum_of_rounded(1.13, 2.06, 1.99, 0.48, 13.95, 0.29)
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
                step=0.001,
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
            *_rail_metrics(causal, whole, tokens, gpus, peak),
        ),
    )


def _sum_of_rounded(*parts: float) -> Amount:
    """Bounds of a sum of parts, each printed to 0.01."""
    return Amount(sum(parts) - 0.005 * len(parts), sum(parts) + 0.005 * len(parts))


def _rail_metrics(causal: float, whole: float, tokens: int, gpus: int, peak: float) -> tuple[PublishedRow, ...]:
    """The column of the multi-rail network, from the time of its step."""
    rate = tokens / 19.946
    how = "15,360 x 4,096 tokens in 19.946 s on 2,048 GPUs"
    shares = (("non-causal", 43.68, whole), ("causal", 38.90, causal))
    return (
        row(
            "tokens of a day, multi-rail",
            272.52,
            Amount(tokens / 19.9465 * 86400 / 1e9, tokens / 19.9455 * 86400 / 1e9),
            f"{how}, which is rounded to 1 ms",
            unit="B",
            step=0.01,
        ),
        row(
            "time of a step from its parts, multi-rail",
            19.946,
            _sum_of_rounded(1.13, 2.03, 1.99, 0.48, 14.00, 0.31),
            "the sum of six parts, each rounded to 0.01 s",
            unit="s",
            step=0.001,
        ),
        *(
            row(f"TFLOPS, {name}, multi-rail", printed, flops * rate / gpus / 1e12, how, unit="TFLOPS")
            for name, printed, flops in (("non-causal", 432, whole), ("causal", 385, causal))
        ),
        *(
            row(
                f"MFU, {name}, multi-rail",
                printed,
                100 * model_flops_utilization(flops, rate, gpus, peak),
                how,
                unit="%",
                step=0.01,
            )
            for name, printed, flops in shares
        ),
    )


def decoding() -> PublishedFigure:
    """Bytes of FP8 dispatch and BF16 combine, 32 tokens to 9 experts, hidden 7,000 as the paper rounds 7,168."""

    def exchange_s(bytes_per_s: float, hidden: int = 7000) -> float:
        return exchange_bytes(hidden, 9).seconds(32, bytes_per_s)

    def rate(bytes_per_s: float, hidden: int = 7000) -> float:
        return 1 / token_seconds(61, exchange_s(bytes_per_s, hidden))

    return PublishedFigure(
        "v3-decoding",
        "decoding limits of expert parallelism",
        f"{V3}, 2.3.2",
        (
            row(
                "communication of a layer at 50 GB/s",
                120.96,
                exchange_s(50e9) * 1e6,
                "3 bytes x 32 x 9 x 7,000",
                unit="us",
                step=0.01,
            ),
            row(
                "time of an output token",
                14.76,
                1e3 / rate(50e9),
                "61 layers, two micro-batches",
                unit="ms",
                step=0.01,
            ),
            row("tokens per second", 67, rate(50e9), "67.75; the paper cuts it off", printed="cut"),
            row(
                "tokens per second with 7,168 instead of 7,000",
                67,
                rate(50e9, 7168),
                "the hidden size is 7,168; the paper takes 7K",
            ),
            row(
                "communication of a layer at 900 GB/s", 6.72, exchange_s(900e9) * 1e6, "as above", unit="us", step=0.01
            ),
            row("time of an output token at 900 GB/s", 0.82, 1e3 / rate(900e9), "as above", unit="ms", step=0.01),
            row("tokens per second at 900 GB/s", 1200, rate(900e9), "'approximately 1200'", step=100),
            row(
                "times as fast with one prediction module",
                1.8,
                speculation_gain(0.85, module_cost=1 / 61),
                "85 % accepted, of 80 to 90 %; the module is one of 61 layers more",
                step=0.1,
            ),
        ),
    )


def local_use(shapes: Mapping[str, ModelShape]) -> PublishedFigure:
    """Measured speeds cannot be above what memory allows."""
    machines = {machine.name: machine for machine in MACHINES}

    def limit(machine: str, model: str) -> float | None:
        seconds = machine_seconds(machines[machine], shapes[model], SEQUENCE_TOKENS, weight_bytes=0.5)
        return None if seconds is None else 1 / seconds

    how = "most that {} allows, 4 bits a parameter"
    return PublishedFigure(
        "v3-local",
        "tokens per second of a single request on one computer",
        f"{V3}, 2.2.2",
        (
            row(
                "DeepSeek-V2 on a PC, nearly",
                20,
                limit("Ryzen AI Max+ 395", "deepseek-v2"),
                how.format("256 GB/s"),
                printed="at least",
            ),
            row(
                "DeepSeek-V2 on a PC, twice that",
                40,
                limit("M4 Max", "deepseek-v2"),
                how.format("546 GB/s"),
                printed="at least",
            ),
            row(
                "a dense model of 70B on similar hardware, single-digit",
                1,
                limit("Ryzen AI Max+ 395", "qwen-2.5-72b"),
                how.format("256 GB/s"),
                step=9,
                printed="cut",
            ),
            row(
                "DeepSeek-V3 on a server with one consumer GPU, nearly",
                20,
                limit("server, one consumer GPU", "deepseek-v3"),
                how.format("614 GB/s for routed experts and 1,008 GB/s for the rest"),
                printed="at least",
            ),
        ),
    )


def routing() -> PublishedFigure:
    """Rates that the paper calls effective; hidden 7,168 and FP8 do not matter for ratios."""
    rates = {"network_bytes_per_s": 40e9, "inside_bytes_per_s": 160e9}
    anywhere, limited = (node_limited_dispatch(8, nodes, 7168, **rates) for nodes in (None, 4))
    return PublishedFigure(
        "v3-routing",
        "node-limited routing",
        f"{V3}, 4.3",
        (
            row("NVLink over InfiniBand, effective", 4, 160 / 40, "160 GB/s / 40 GB/s"),
            row(
                "time of a token to 8 devices over the network, in t",
                8,
                anywhere.network * 40e9 / 7168,
                "a copy for each device",
            ),
            row(
                "time of a token to 8 devices in 4 nodes, in t",
                4,
                limited.longest * 40e9 / 7168,
                "a copy for each node; forwarding takes 2 t meanwhile",
            ),
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
            row(
                "DeepSeekMoE-16B, parallel efficiency 40 to 320 GPUs",
                0.9292,
                79.615 / (8 * 10.71),
                "79.615 s / (8 x 10.71 s)",
                step=0.0001,
            ),
            row(
                "DeepSeekMoE-16B, parallel efficiency 40 to 640 GPUs",
                0.7614,
                79.615 / (16 * 6.535),
                "79.615 s / (16 x 6.535 s)",
                step=0.0001,
            ),
        ),
    )
