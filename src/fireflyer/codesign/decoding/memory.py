"""What a decoding step reads from memory, and how long that takes (DeepSeek-V3 paper, 2.1.2, 2.2.2, 6.6)."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.codesign.model import ModelShape, count_parameters, kv_bytes_per_sequence, kv_bytes_read
from fireflyer.codesign.model.parameters import expert_parameters

__all__ = [
    "CACHE_FORMATS",
    "MACHINES",
    "CacheFormat",
    "DecodeReads",
    "Machine",
    "cache_bytes",
    "decode_reads",
    "device_layer_seconds",
    "machine_seconds",
    "read_experts",
]


class CacheFormat(msgspec.Struct, frozen=True):
    """Values of a KV cache in `bits` each, with `group_bits` of scale and zero for each group of `group` values."""

    bits: int
    group: int = 1
    group_bits: int = 0

    @property
    def value_bytes(self) -> float:
        """Bytes of one value with its part of the scales."""
        return (self.bits + self.group_bits / self.group) / 8


CACHE_FORMATS: Final = {
    "bf16": CacheFormat(16),
    "fp8": CacheFormat(8, 128, 32),
    "int4": CacheFormat(4, 64, 32),
    "int2": CacheFormat(2, 32, 32),
}
"""FP8 with an FP32 scale for 128 values, as token codecs have it; INT4 and INT2 with a BF16 scale and a BF16 zero."""


def cache_bytes(shape: ModelShape, tokens: int, form: CacheFormat) -> float:
    """Bytes of the KV cache of a sequence of `tokens` in all layers."""
    return kv_bytes_per_sequence(shape, tokens, 1) * form.value_bytes


class DecodeReads(NamedTuple):
    """Bytes that one decoding step of a batch reads."""

    experts: float
    """Bytes of the weights of routed experts."""
    others: float
    """Bytes of all other weights: each is read once for the whole batch."""
    cache: float
    """Bytes of the KV caches of all sequences."""

    @property
    def total(self) -> float:
        return sum(self)


def read_experts(routed: int, per_token: int, tokens: int) -> float:
    """Expected number of different experts of `tokens` tokens, each of which goes to `per_token` taken uniformly.

    >>> read_experts(256, 8, 1), round(read_experts(256, 8, 32), 1)
    (8.0, 163.3)
    """
    return routed * (1 - (1 - per_token / routed) ** tokens)


def decode_reads(
    shape: ModelShape,
    batch: int,
    context: int,
    *,
    weight_bytes: float = 2.0,
    cache: CacheFormat = CACHE_FORMATS["bf16"],
) -> DecodeReads:
    """Reads of `batch` sequences with `context` tokens each; `weight_bytes` of one parameter. Of the input embedding
    one row is read for each token, which does not count here. Raises `UsageError`."""
    if batch < 1 or context < 0 or not weight_bytes > 0:
        raise UsageError(f"{batch} sequences of {context} tokens, {weight_bytes} bytes; use 1 or more sequences")
    count, one = count_parameters(shape), expert_parameters(shape)
    cache_read = kv_bytes_read(shape, context, 1) * cache.value_bytes
    others = count.active - (count.embedding if count.head else 0)
    routed = 0.0
    if shape.experts is not None:
        others -= shape.expert_layers * shape.experts.per_token * one
        routed = shape.expert_layers * read_experts(shape.experts.routed, shape.experts.per_token, batch) * one
    return DecodeReads(weight_bytes * routed, weight_bytes * others, batch * cache_read)


def device_layer_seconds(
    shape: ModelShape,
    tokens: int,
    context: int,
    bytes_per_s: float,
    *,
    experts_held: int = 1,
    weight_bytes: float = 1.0,
    cache: CacheFormat = CACHE_FORMATS["bf16"],
) -> float:
    """Seconds in which a device of an expert-parallel group reads what one layer needs for `tokens` sequences of
    `context` tokens: the layer's own weights, `experts_held` experts and the caches. The mean of all layers."""
    reads, count = decode_reads(shape, tokens, context, weight_bytes=weight_bytes, cache=cache), count_parameters(shape)
    layers = (reads.others - weight_bytes * count.head + reads.cache) / shape.layers
    return (layers + experts_held * weight_bytes * expert_parameters(shape)) / bytes_per_s


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A computer for one user. Rates are those of data sheets, which nothing reaches: limits, not predictions."""

    name: str
    bytes_per_s: float
    """Bandwidth of the memory of the GPU, or of the only memory."""
    memory_bytes: int
    host_bytes_per_s: float = 0.0
    """Bandwidth of host memory in which routed experts lie, read by the processor; 0: there is none."""
    host_memory_bytes: int = 0
    source: str


MACHINES: Final = (
    Machine(name="Ryzen AI Max+ 395", bytes_per_s=256e9, memory_bytes=128 * 10**9,
            source="AMD data sheet: LPDDR5X-8000, 256 bits"),
    Machine(name="DGX Spark", bytes_per_s=273e9, memory_bytes=128 * 10**9, source="NVIDIA data sheet"),
    Machine(name="M4 Max", bytes_per_s=546e9, memory_bytes=128 * 10**9, source="Apple data sheet"),
    Machine(name="server, one consumer GPU", bytes_per_s=1008e9, memory_bytes=24 * 10**9, host_bytes_per_s=614e9,
            host_memory_bytes=1024 * 10**9, source="RTX 4090 data sheet; two sockets with 8 channels of DDR5-4800"),
)  # fmt: skip
"""Those of the DeepSeek-V3 paper, 2.2.2: PCs with AI SoCs, and a server with routed experts in host memory
(KTransformers)."""


def machine_seconds(machine: Machine, shape: ModelShape, context: int, *, weight_bytes: float) -> float | None:
    """Time of one token of a single request at the least; None where the model does not fit. Routed experts lie in host
    memory where there is one; the processor and the GPU take turns, layer by layer."""
    count, reads = count_parameters(shape), decode_reads(shape, 1, context, weight_bytes=weight_bytes)
    experts = 0 if shape.experts is None else shape.expert_layers * shape.experts.routed * expert_parameters(shape)
    in_host = experts if machine.host_bytes_per_s else 0
    if weight_bytes * in_host > machine.host_memory_bytes:
        return None
    held = cache_bytes(shape, context, CACHE_FORMATS["bf16"])  # with an index a token reads less than is held
    if weight_bytes * (count.total - in_host) + held > machine.memory_bytes:
        return None
    if not in_host:
        return reads.total / machine.bytes_per_s
    return reads.experts / machine.host_bytes_per_s + (reads.others + reads.cache) / machine.bytes_per_s
