"""Limits of decoding: memory, interconnect with overlapped micro-batches, speculation, prefill and decoding apart.

exchange = exchange_bytes(7000, 9)                                     # FP8 to 9 experts, BF16 back
token_seconds(61, exchange.seconds(32, 50e9))                          # 14.76 ms (DeepSeek-V3 paper, 2.3.2)
decode_reads(shape, 1, 4096).total / 1555e9                            # of one request from memory
"""

from fireflyer.codesign.decoding.exchange import (
    DispatchTime,
    ExchangeBytes,
    compute_share,
    exchange_bytes,
    node_limited_dispatch,
    token_seconds,
)
from fireflyer.codesign.decoding.memory import (
    CACHE_FORMATS,
    MACHINES,
    CacheFormat,
    DecodeReads,
    Machine,
    cache_bytes,
    decode_reads,
    device_layer_seconds,
    machine_seconds,
    read_experts,
)
from fireflyer.codesign.decoding.serving import Split, prefill_rate, speculation_gain, split_gpus

__all__ = [
    "CACHE_FORMATS",
    "MACHINES",
    "CacheFormat",
    "DecodeReads",
    "DispatchTime",
    "ExchangeBytes",
    "Machine",
    "Split",
    "cache_bytes",
    "compute_share",
    "decode_reads",
    "device_layer_seconds",
    "exchange_bytes",
    "machine_seconds",
    "node_limited_dispatch",
    "prefill_rate",
    "read_experts",
    "speculation_gain",
    "split_gpus",
    "token_seconds",
]
