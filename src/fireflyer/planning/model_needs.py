"""What a model needs: parameters, FLOPs, memory, and what limits its decoding. Pure.

    answer = plan_model(shape_from_config(config), ModelUse(sequence_tokens=32_768, memory_bytes_per_s=3350e9))
    answer.parameters.active, answer.kv_sequence_bytes, answer.request_tokens_per_s["fp8"]

Speeds are upper limits: what a device does beside reading and sending is left out. The formulas are those of
`codesign.model` and `codesign.decoding`; here are the conventions by which planners put them together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.codesign.decoding import (
    CACHE_FORMATS,
    MACHINES,
    Split,
    cache_bytes,
    compute_share,
    decode_reads,
    device_layer_seconds,
    exchange_bytes,
    machine_seconds,
    node_limited_dispatch,
    prefill_rate,
    speculation_gain,
    split_gpus,
    token_seconds,
)
from fireflyer.codesign.model import (
    Experts,
    ModelShape,
    ParameterCount,
    count_parameters,
    dense_flops,
    kv_bytes_per_sequence,
    kv_bytes_per_token,
    training_flops,
)
from fireflyer.collectives.tokens import TOKEN_CODECS, TileCodec, token_codec

__all__ = ["ExpertLimits", "ModelAnswer", "ModelUse", "ServiceAnswer", "SpeculationGain", "plan_model"]

WEIGHT_BYTES: Final[Mapping[str, float]] = {"bf16": 2, "fp8": 1, "4 bits without scales": 0.5}
"""Of a parameter."""
DECODING_FORMATS: Final = ("bf16", "fp8")
TRAINING_BYTES: Final[Mapping[str, int]] = {
    "bf16 weights and gradients, fp32 master and two moments": 16,
    "bf16 weights, fp32 moments": 10,
}
"""Of a parameter."""
CHECKPOINT_BYTES: Final = 14
"""Of a parameter: bf16 weights, fp32 master weights and two moments."""
LOCAL_BYTES: Final = 0.5
"""Of a parameter on the computer of one user: 4 bits."""
ACCEPTANCE: Final = (0.8, 0.9)
"""Of predicted tokens (DeepSeek-V3 paper, 2.3.3)."""
SMS: Final = 132
"""Of an H100 or H800."""


class ModelUse(msgspec.Struct, frozen=True, kw_only=True):
    """Use of a model. Raises `UsageError` for what is not above 0."""

    sequence_tokens: int = 4096
    """Tokens of a sequence in training, of a prompt, and in the KV cache while decoding."""
    memory_bytes_per_s: float = 1555e9
    """Bandwidth of the memory from which tokens are decoded."""
    batch_tokens: int = 32
    """Tokens of a micro-batch of a device, with experts on many devices; of a batch of a device otherwise."""
    network_bytes_per_s: float = 50e9
    """Network bandwidth of a device in each direction, over which tokens go to experts."""
    inside_bytes_per_s: float = 160e9
    """Bandwidth of a device inside a node, over which tokens are forwarded: NVLink of an H800 in practice (DeepSeek-V3
    paper, 4.3)."""
    nodes_per_token: int | None = None
    """Most nodes to which a token is sent; None: as many as the model's routing is limited to."""
    gpu_flops: float | None = None
    """FLOPs per second that a GPU delivers; None: GPUs are not divided into prefill and decoding."""
    answer_tokens: int = 1000
    """Tokens of the answer to a prompt."""
    lent_sms: int = 0
    """SMs, of 132, that move messages during prefill and do not compute."""

    def __post_init__(self) -> None:
        names = ("sequence_tokens", "memory_bytes_per_s", "batch_tokens", "network_bytes_per_s", "inside_bytes_per_s")
        for name in (*names, "answer_tokens"):
            _above_0(name, getattr(self, name))
        for name in ("gpu_flops", "nodes_per_token"):
            if getattr(self, name) is not None:
                _above_0(name, getattr(self, name))
        compute_share(SMS, self.lent_sms)


class ExpertLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of decoding with each routed expert on a device of its own, FP8 weights, FP8 there and BF16 back."""

    exchange_s: float
    """Time of dispatch and combine of `batch_tokens` tokens in one layer, seconds."""
    helped_exchange_s: float
    """Time of the same exchange with multicast and aggregation in the network, while another micro-batch is in the
    opposite phase, seconds."""
    read_s: float
    """Time in which a device reads one layer from memory, seconds."""
    exchange_tokens_per_s: float
    """Most of a request, with two micro-batches that overlap, limited by the exchange alone."""
    tokens_per_s: float
    """The same, limited by exchange and memory."""
    serial_tokens_per_s: float
    """The same, without overlap."""
    wire_bytes: Mapping[str, int]
    """Bytes of a token on the network, by name of its codec; codecs of tiles only where they divide the hidden
    dimension."""
    nodes_per_token: int | None
    """Most nodes to which a token is routed; None: routing has no such limit, and the next two are None."""
    dispatch_s: float | None
    """Time to send one token to each of its devices over the network, seconds."""
    node_dispatch_s: float | None
    """Time to send one token to each of its nodes once, and to forward it inside at `inside_bytes_per_s`, seconds."""


class SpeculationGain(msgspec.Struct, frozen=True, kw_only=True):
    """Gain of multi-token prediction."""

    acceptance: float
    """Probability with which a predicted token is accepted, 0 to 1."""
    gain: float
    """Tokens per second over those without."""


class ServiceAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs divided into prefill and decoding."""

    compute_share: float
    """SMs that compute during prefill, over all."""
    prefill_tokens_per_s: float
    """Tokens per second of one GPU of the prefill pool."""
    decode_tokens_per_s: float
    """Tokens per second of one GPU of the decoding pool."""
    split: Split


class ModelAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `plan_model`."""

    parameters: ParameterCount
    causal_flops: float
    """FLOPs of a token in training, with attention scores of the lower triangle alone."""
    whole_flops: float
    """The same with the scores of the whole matrix."""
    dense_flops: float
    """6 (12 L h^2 + V h)."""
    kv_token_bytes: int
    """KV cache of one token, bytes in BF16."""
    kv_sequence_bytes: int
    kv_quantised_bytes: Mapping[str, float]
    """KV cache of a sequence with its scales, bytes by format: `codesign.decoding.CACHE_FORMATS` without BF16."""
    weight_bytes: Mapping[str, float]
    """Bytes of all weights, by format."""
    training_bytes: Mapping[str, int]
    """Bytes of weights, gradients and optimizer states together, by the formats that are kept."""
    checkpoint_bytes: int
    """BF16 weights, FP32 master weights and two moments."""
    request_tokens_per_s: Mapping[str, float]
    """Most of one request that memory allows, by format of the weights."""
    machine_tokens_per_s: Mapping[str, float | None]
    """Most of one request on the computers of `codesign.decoding.MACHINES`, 4 bits; None: it does not fit."""
    experts: ExpertLimits | None
    """None: the model has none."""
    speculation: tuple[SpeculationGain, ...]
    """(): the model predicts one token only."""
    service: ServiceAnswer | None
    """None where no FLOPs of a GPU are given."""


def plan_model(shape: ModelShape, use: ModelUse | None = None) -> ModelAnswer:
    """Compute what the model needs; `use` is `ModelUse()` by default. Raises `UsageError`."""
    given = use or ModelUse()
    count, tokens = count_parameters(shape), given.sequence_tokens
    return ModelAnswer(
        parameters=count,
        causal_flops=training_flops(shape, tokens),
        whole_flops=training_flops(shape, tokens, causal=False),
        dense_flops=dense_flops(shape),
        kv_token_bytes=kv_bytes_per_token(shape),
        kv_sequence_bytes=kv_bytes_per_sequence(shape, tokens),
        kv_quantised_bytes={
            name: cache_bytes(shape, tokens, form) for name, form in CACHE_FORMATS.items() if name != "bf16"
        },
        weight_bytes={name: size * count.total for name, size in WEIGHT_BYTES.items()},
        training_bytes={name: size * count.total for name, size in TRAINING_BYTES.items()},
        checkpoint_bytes=CHECKPOINT_BYTES * count.total,
        request_tokens_per_s={
            name: given.memory_bytes_per_s / decode_reads(shape, 1, tokens, weight_bytes=WEIGHT_BYTES[name]).total
            for name in DECODING_FORMATS
        },
        machine_tokens_per_s=_on_machines(shape, tokens),
        experts=None if shape.experts is None else _experts(shape, shape.experts, given),
        speculation=_speculation(shape),
        service=None if given.gpu_flops is None else _service(shape, given, given.gpu_flops),
    )


def _above_0(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise UsageError(f"{name} is {value}; give a number above 0")


def _on_machines(shape: ModelShape, tokens: int) -> dict[str, float | None]:
    times = {one.name: machine_seconds(one, shape, tokens, weight_bytes=LOCAL_BYTES) for one in MACHINES}
    return {name: None if seconds is None else 1 / seconds for name, seconds in times.items()}


def _experts(shape: ModelShape, experts: Experts, given: ModelUse) -> ExpertLimits:
    exchange_s, read_s = _layer_seconds(shape, experts, given)
    helped = exchange_bytes(shape.hidden, _copies(experts), multicast=True, aggregation=True)
    rates = {"network_bytes_per_s": given.network_bytes_per_s, "inside_bytes_per_s": given.inside_bytes_per_s}
    nodes = given.nodes_per_token or (experts.groups_per_token if experts.groups > 1 else None)
    anywhere = node_limited_dispatch(experts.per_token, None, shape.hidden, **rates)
    limited = node_limited_dispatch(experts.per_token, nodes, shape.hidden, **rates)
    return ExpertLimits(
        exchange_s=exchange_s,
        helped_exchange_s=helped.seconds(given.batch_tokens, given.network_bytes_per_s, at_once=True),
        read_s=read_s,
        exchange_tokens_per_s=1 / token_seconds(shape.layers, exchange_s),
        tokens_per_s=1 / token_seconds(shape.layers, exchange_s, read_s),
        serial_tokens_per_s=1 / token_seconds(shape.layers, exchange_s, read_s, overlapped=False),
        wire_bytes=_wire_bytes(shape),
        nodes_per_token=nodes,
        dispatch_s=None if nodes is None else anywhere.longest,
        node_dispatch_s=None if nodes is None else limited.longest,
    )


def _wire_bytes(shape: ModelShape) -> dict[str, int]:
    codecs = [token_codec(name) for name in sorted(TOKEN_CODECS) if name not in ("f32", "f64")]
    return {
        codec.name: codec.row_bytes(shape.hidden)
        for codec in codecs
        if not isinstance(codec, TileCodec) or shape.hidden % codec.unit == 0
    }


def _speculation(shape: ModelShape) -> tuple[SpeculationGain, ...]:
    if not shape.mtp_layers:
        return ()
    return tuple(
        SpeculationGain(
            acceptance=acceptance, gain=speculation_gain(acceptance, shape.mtp_layers, module_cost=1 / shape.layers)
        )
        for acceptance in ACCEPTANCE
    )


def _service(shape: ModelShape, given: ModelUse, gpu_flops: float) -> ServiceAnswer:
    share = compute_share(SMS, given.lent_sms)
    prefill_per_s = prefill_rate(shape, given.sequence_tokens, gpu_flops * share)
    decode_per_s = _decode_rate(shape, given)
    split = split_gpus(
        shape,
        given.sequence_tokens,
        given.answer_tokens,
        prefill_per_s=prefill_per_s,
        decode_per_s=decode_per_s,
        cache=CACHE_FORMATS["bf16"],
    )
    return ServiceAnswer(
        compute_share=share, prefill_tokens_per_s=prefill_per_s, decode_tokens_per_s=decode_per_s, split=split
    )


def _decode_rate(shape: ModelShape, given: ModelUse) -> float:
    """Tokens per second of a device: of two micro-batches where experts are on many devices, of one batch else."""
    tokens = given.batch_tokens
    if shape.experts is None:
        reads = decode_reads(shape, tokens, given.sequence_tokens, weight_bytes=WEIGHT_BYTES["fp8"])
        return tokens * given.memory_bytes_per_s / reads.total
    return 2 * tokens / token_seconds(shape.layers, *_layer_seconds(shape, shape.experts, given))


def _layer_seconds(shape: ModelShape, experts: Experts, given: ModelUse) -> tuple[float, float]:
    """Of a micro-batch: of the exchange, and of reading."""
    exchange = exchange_bytes(shape.hidden, _copies(experts)).seconds(given.batch_tokens, given.network_bytes_per_s)
    return exchange, device_layer_seconds(shape, given.batch_tokens, given.sequence_tokens, given.memory_bytes_per_s)


def _copies(experts: Experts) -> int:
    """Devices that a token goes to: of its routed experts and of the shared one."""
    return experts.per_token + bool(experts.shared_feed_forward)
