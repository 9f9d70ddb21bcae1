"""The compiled extension. Import `fireflyer.native`, never `_core` directly.

Kernels work on anything contiguous with the buffer protocol (NumPy arrays, memoryviews, bytes for inputs); their
element type is a name: `f64 f32 f16 bf16 f8e4m3 f8e5m2 i32 i64 i8 u8`. Bad sizes and unknown names raise
`ValueError`, an argument that is no buffer raises `TypeError`. The GIL is released while they run. What they compute,
to the bit, is written down in `fireflyer.collectives.kernels`.
"""

import os

from fireflyer.native import _core
from fireflyer.native._core import (
    ANY_RANK,
    DTYPES,
    FAILURE_KINDS,
    OP_KINDS,
    REDUCE_OPS,
    Arena,
    ChunkError,
    ChunkNode,
    ChunkRing,
    ChunkTarget,
    Exchange,
    Executor,
    Fabric,
    NativeWork,
    OpenMemory,
    Recorder,
    RecorderEntry,
    active_isa,
    address_of,
    can_access,
    cpu_features,
    crc32c,
    crc32c_copy,
    crc32c_portable,
    create_window,
    decode_token_rows,
    dequantize_fp8_blocks,
    encode_token_rows,
    exchange_of,
    interleave_window,
    isa_names,
    memory_probe,
    orient,
    quantize_fp8_blocks,
    reduce,
    reduce_many,
    reduce_to_accum,
    round_from_accum,
    set_isa,
    submit_parts,
    tree_program,
)

__all__ = [
    "ANY_RANK",
    "DTYPES",
    "FAILURE_KINDS",
    "OP_KINDS",
    "REDUCE_OPS",
    "Arena",
    "ChunkError",
    "ChunkNode",
    "ChunkRing",
    "ChunkTarget",
    "Exchange",
    "Executor",
    "Fabric",
    "NativeWork",
    "OpenMemory",
    "Recorder",
    "RecorderEntry",
    "active_isa",
    "address_of",
    "can_access",
    "cpu_features",
    "crc32c",
    "crc32c_copy",
    "crc32c_portable",
    "create_window",
    "decode_token_rows",
    "dequantize_fp8_blocks",
    "encode_token_rows",
    "exchange_of",
    "interleave_window",
    "isa_names",
    "memory_probe",
    "orient",
    "quantize_fp8_blocks",
    "reduce",
    "reduce_many",
    "reduce_to_accum",
    "round_from_accum",
    "set_isa",
    "submit_parts",
    "tree_program",
    "ucx_module",
]


def ucx_module() -> str:
    """Path of the module that `Fabric` loads, if it was built."""
    return os.path.join(os.path.dirname(_core.__file__ or ""), "_ucx.so")
