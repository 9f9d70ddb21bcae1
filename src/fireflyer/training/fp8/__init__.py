"""Linear layers whose matrix products have FP8 operands, with a scale for each tile, as DeepSeek-V3 was trained.

    converted = convert(model)             # linear layers and experts, but head, gate, router; say more with keep=
    wrapped = DistributedDataParallel(model)   # or fully_shard(model): names and dtypes of parameters have not changed
    ...
    for line in report(model): print(line)     # what underflowed, saturated, was not finite

Source: DeepSeek-V3 technical report 3.3; "Insights into DeepSeek-V3" 3.1.1; DeepGEMM for the scales.
"""

from fireflyer.training.fp8.config import Fp8Config
from fireflyer.training.fp8.convert import DEFAULT_KEEP, Conversion, convert, report, reset_counts
from fireflyer.training.fp8.counts import OPERANDS, OperandCounts
from fireflyer.training.fp8.grouped import Fp8GroupedLinear
from fireflyer.training.fp8.linear import Fp8Linear
from fireflyer.training.fp8.products import product
from fireflyer.training.fp8.tiles import TILE, Quantized, dequantize, quantize

__all__ = [
    "DEFAULT_KEEP",
    "OPERANDS",
    "TILE",
    "Conversion",
    "Fp8Config",
    "Fp8GroupedLinear",
    "Fp8Linear",
    "OperandCounts",
    "Quantized",
    "convert",
    "dequantize",
    "product",
    "quantize",
    "report",
    "reset_counts",
]
