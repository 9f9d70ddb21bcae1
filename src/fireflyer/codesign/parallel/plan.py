"""`ParallelPlan`: how one training job is divided over GPUs, and the check that it can be.

Degrees follow the papers: `pipeline` stages; `replicate` x `shard` data-parallel ranks, of which those of a shard group
divide optimizer states (ZeRO 1), gradients (2) and parameters (3, FSDP) between them; `tensor` ranks that divide each
matrix; `expert` ranks, taken from the data and tensor ranks of a stage, that divide the routed experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, get_args

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.token_formats import TILE, TILE_BYTES, token_row_bytes
from fireflyer.codesign.model import LatentAttention, ModelShape
from fireflyer.codesign.parallel.node import NodeModel

__all__ = [
    "FORMAT_BYTES",
    "RECOMPUTE",
    "SCHEDULES",
    "LayerRecompute",
    "MatrixFormat",
    "ParallelPlan",
    "PlanRecompute",
    "Precision",
    "Recompute",
    "Schedule",
    "WireFormat",
    "refusals",
    "shape_refusals",
]

ValueFormat = Literal["fp8", "bf16", "fp32"]
MatrixFormat = Literal["fp8", "bf16", "fp32"]
WireFormat = Literal["bf16", "fp32", "fp8", "fp8_ue8m0", "e5m6", "logfmt8", "logfmt10"]
"""A codec of `fireflyer.collectives.tokens`: two of single values, the others of tiles of 128."""
Schedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe", "dualpipev"]
Recompute = Literal["none", "operators", "blocks", "full"]
LayerRecompute = Literal["none", "operators", "blocks"]
PlanRecompute = Literal["none", "operators", "blocks", "full", "budget"] | tuple[LayerRecompute, ...]

SCHEDULES: Final[tuple[Schedule, ...]] = get_args(Schedule)
RECOMPUTE: Final[tuple[Recompute, ...]] = get_args(Recompute)
FORMAT_BYTES: Final = {"fp8": 1, "bf16": 2, "fp32": 4}
MAX_DEGREE: Final = 1 << 20


class Precision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Formats of what training keeps and sends. The defaults are mixed precision with FP32 states (ZeRO paper): 16
    bytes per parameter, and 2 for an accumulated FP32 gradient instead of a BF16 one."""

    parameters: Literal["bf16", "fp32"] = "bf16"
    gradients: Literal["bf16", "fp32"] = "fp32"
    """Format in which gradients are accumulated, and added over data-parallel ranks."""
    moments: Literal["bf16", "fp32"] = "fp32"
    """Both moments of Adam."""
    compute: MatrixFormat = "bf16"
    """Factors of matrix products; attention scores are BF16. FP32 is for small models on CPUs."""
    activations: MatrixFormat = "bf16"
    """Kept inputs of matrix products; the residual stream is BF16."""
    dispatch: WireFormat | None = None
    """Tokens on their way to experts; None: as parameters are, and so the residual stream."""
    combine: WireFormat | None = None
    """Results of experts on their way back; None: likewise."""

    @property
    def stream_bytes(self) -> int:
        """Bytes of one value of the residual stream, which has the format of parameters, also under autocast."""
        return FORMAT_BYTES[self.parameters]

    @property
    def product_bytes(self) -> int:
        """Bytes of one value of the result of a matrix product: BF16 unless FP32 parameters are multiplied in FP32."""
        return 4 if self.parameters == "fp32" and self.compute != "bf16" else 2

    def dispatch_bytes(self, width: int) -> int:
        """Bytes of a token of `width` values on its way to an expert; a tile that is not full counts as one."""
        return _row_bytes(self.dispatch or self.parameters, width)

    def combine_bytes(self, width: int) -> int:
        """Bytes of an expert's result on its way back, likewise."""
        return _row_bytes(self.combine or self.parameters, width)

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer states per parameter: two moments, and an FP32 copy of BF16 parameters."""
        return 2 * FORMAT_BYTES[self.moments] + (4 if self.parameters == "bf16" else 0)


def _row_bytes(form: WireFormat, width: int) -> int:
    if form in TILE_BYTES:
        return token_row_bytes(-(-width // TILE) * TILE, form)
    return width * FORMAT_BYTES[form]


class ParallelPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Division of a training step over GPUs. `refusals` says whether a model and nodes fit it.

    >>> ParallelPlan(pipeline=16, shard=128, expert=64, zero=1, sequence_tokens=4096, batch_sequences=15360).world_size
    2048
    """

    sequence_tokens: int
    batch_sequences: int
    """Sequences of one step, of all data-parallel ranks."""
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    expert: int = 1
    zero: int = 0
    """ZeRO stage over the shard group: 1 optimizer states, 2 and gradients, 3 and parameters (FSDP)."""
    micro_batch: int = 1
    """Sequences of one micro-batch."""
    schedule: Schedule = "1f1b"
    chunks: int = 1
    """Stages of one rank; only `interleaved` has a choice."""
    recompute: PlanRecompute = "none"
    """Activations that backward computes again: none; norms, activation functions and projections from latents
    (`operators`); each block from its input (`blocks`); the whole stage from its input (`full`). Or one of the first
    three for each layer, those of multi-token prediction last; `budget` asks `fit_recompute` for them."""
    precision: Precision = Precision()

    @property
    def data(self) -> int:
        """Data-parallel ranks."""
        return self.replicate * self.shard

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.data * self.tensor

    @property
    def world_size(self) -> int:
        """GPUs of the job."""
        return self.pipeline * self.stage_ranks

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one data-parallel rank in a step, rounded down."""
        return self.batch_sequences // (self.data * self.micro_batch)

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.micro_batch * self.sequence_tokens

    @property
    def step_tokens(self) -> int:
        """Tokens of one step, of all ranks."""
        return self.batch_sequences * self.sequence_tokens

    @property
    def expert_data(self) -> int:
        """Ranks of a stage that have the same experts."""
        return self.stage_ranks // self.expert

    @property
    def expert_shard(self) -> int:
        """Ranks over which states of an expert are divided: those of a shard group that have the same experts."""
        return max(1, self.shard * self.tensor // self.expert)

    @property
    def rows_of_whole(self) -> bool:
        """Whether ZeRO 1 divides whole parameters and gradients by rows, as with stages and divided experts; FSDP does
        without them."""
        return self.zero == 1 and (self.pipeline > 1 or self.expert > 1)

    @property
    def reduces_shards(self) -> bool:
        """Whether a rank keeps the gradients that it steps alone, in FP32, and no whole ones between micro-batches."""
        return self.zero >= 2 or (self.zero == 1 and self.micro_batches == 1 and not self.rows_of_whole)

    @property
    def pieces(self) -> int:
        """Parts into which the layers are cut, in the order in which a token passes them."""
        return self.pipeline * pieces_per_rank(self.schedule, self.chunks)

    def pieces_of(self, stage: int) -> tuple[int, ...]:
        """Pieces that the ranks of `stage` hold. DualPipe holds two for its two directions, each piece twice in all."""
        p = self.pipeline
        if p == 1:
            return tuple(range(self.pieces))
        if self.schedule == "dualpipe":
            return (stage, p - 1 - stage)
        if self.schedule in ("zbv", "dualpipev"):
            return (stage, 2 * p - 1 - stage)
        return tuple(range(stage, self.pieces, p))


def pieces_per_rank(schedule: Schedule, chunks: int) -> int:
    """Parts of the model that a micro-batch passes on one rank."""
    if schedule == "interleaved":
        return chunks
    return 2 if schedule in ("zbv", "dualpipev") else 1


def refusals(plan: ParallelPlan, shape: ModelShape, node: NodeModel, nodes: int) -> list[str]:
    """Reasons why the plan cannot be run, one line each with the numbers; empty if it can. Memory is checked by
    `fireflyer.codesign.parallel.memory`. Raises `UsageError` for degrees that are no numbers of ranks."""
    return [*_nodes(plan, node, nodes), *shape_refusals(plan, shape)]


def shape_refusals(plan: ParallelPlan, shape: ModelShape) -> list[str]:
    """Reasons of `refusals` that hold on any nodes. Raises `UsageError` as it does."""
    for name in ("pipeline", "replicate", "shard", "tensor", "expert", "micro_batch", "chunks"):
        if not 1 <= getattr(plan, name) <= MAX_DEGREE:
            raise UsageError(f"{name} is {getattr(plan, name)}; use 1 to {MAX_DEGREE}")
    for name in ("sequence_tokens", "batch_sequences"):
        if not 1 <= getattr(plan, name) <= 1 << 40:
            raise UsageError(f"{name} is {getattr(plan, name)}; use 1 or more")
    if not 0 <= plan.zero <= 3:
        raise UsageError(f"zero is {plan.zero}; use 0, 1, 2 or 3")
    found = (_ranks(plan), _matrices(plan, shape), _experts(plan, shape), _pipeline(plan, shape))
    return [line for lines in (*found, _recompute(plan, shape)) for line in lines]


def _nodes(plan: ParallelPlan, node: NodeModel, nodes: int) -> Iterator[str]:
    gpus = nodes * node.gpus
    if plan.world_size != gpus:
        yield (
            f"pipeline {plan.pipeline} x replicate {plan.replicate} x shard {plan.shard} x tensor {plan.tensor} = "
            f"{plan.world_size} ranks, but {nodes} nodes of {node.gpus} GPUs are {gpus}"
        )
    if plan.stage_ranks % node.gpus and node.gpus % plan.stage_ranks:
        yield (
            f"a stage has {plan.stage_ranks} ranks, which is neither a multiple nor a divisor of the {node.gpus} GPUs "
            "of a node"
        )
    if plan.tensor > node.nvlink_gpus:
        yield f"tensor = {plan.tensor} is more than the {node.nvlink_gpus} GPUs that NVLink joins on {node.name}"
    if node.gemm_flops.of(plan.precision.compute) <= 0:
        yield f"compute = {plan.precision.compute!r} is not possible: GPUs of {node.name} have no matrix units for it"


def _ranks(plan: ParallelPlan) -> Iterator[str]:
    if plan.batch_sequences % (plan.data * plan.micro_batch):
        yield (
            f"{plan.batch_sequences} sequences do not divide into micro-batches of {plan.micro_batch} for "
            f"{plan.data} data-parallel ranks"
        )
    if plan.zero and plan.shard == 1:
        yield f"zero = {plan.zero} divides states over shard = 1 ranks; use a larger shard, or zero = 0"
    if not plan.zero and plan.shard > 1:
        yield f"shard = {plan.shard} divides nothing with zero = 0; use zero 1 to 3, or replicate"
    if plan.zero > 1 and plan.pipeline > 1:
        yield (
            f"zero = {plan.zero} with pipeline = {plan.pipeline} would gather or scatter in each of "
            f"{plan.micro_batches} micro-batches; use zero = 1"
        )


def _matrices(plan: ParallelPlan, shape: ModelShape) -> Iterator[str]:
    tensor = plan.tensor
    if isinstance(shape.attention, LatentAttention) and shape.attention.index is not None:
        yield f"what an index of tokens (model_type {shape.model_type}) keeps in training is not known here"
    if tensor > 1 and shape.attention.heads % tensor:
        yield f"{shape.attention.heads} attention heads do not divide into tensor = {tensor} parts"
    if tensor > 1 and shape.feed_forward % tensor:
        yield f"feed-forward dimension {shape.feed_forward} does not divide into tensor = {tensor} parts"
    if tensor > 1 and plan.sequence_tokens % tensor:
        yield f"{plan.sequence_tokens} tokens of a sequence do not divide into tensor = {tensor} parts"


def _experts(plan: ParallelPlan, shape: ModelShape) -> Iterator[str]:
    expert = plan.expert
    if expert == 1:
        return
    if shape.experts is None:
        yield f"expert = {expert}, but the model has no experts; use expert = 1"
        return
    if shape.experts.routed % expert:
        yield f"{shape.experts.routed} routed experts do not divide over expert = {expert} ranks"
    if plan.stage_ranks % expert:
        yield f"expert = {expert} does not divide the {plan.stage_ranks} ranks of a stage"
    for name in ("dispatch", "combine"):
        form = getattr(plan.precision, name)
        if form in TILE_BYTES and shape.hidden % TILE:
            yield f"precision.{name} = {form!r} has tiles of {TILE} values, and hidden states have {shape.hidden}"
    group = plan.shard * plan.tensor
    if group % expert and expert % group:
        yield f"expert = {expert} neither divides nor is a multiple of shard x tensor = {group}"


def _recompute(plan: ParallelPlan, shape: ModelShape) -> Iterator[str]:
    layers = shape.layers + shape.mtp_layers
    if plan.recompute == "budget":
        yield "recompute = 'budget' depends on the memory of a GPU: use the list of modes that `ff train plan` prints"
    elif isinstance(plan.recompute, tuple) and len(plan.recompute) != layers:
        yield f"recompute has {len(plan.recompute)} modes; give one for each of {layers} layers and prediction modules"


def _pipeline(plan: ParallelPlan, shape: ModelShape) -> Iterator[str]:
    p, m = plan.pipeline, plan.micro_batches
    if plan.pieces > shape.layers + 1:
        yield f"{shape.layers} layers and the output head do not give {plan.pieces} stages one each"
    if plan.chunks > 1 and plan.schedule != "interleaved":
        yield f"chunks = {plan.chunks} is for the schedule interleaved; {plan.schedule} has its own number of stages"
    if plan.schedule == "interleaved" and (plan.chunks < 2 or p == 1):
        yield f"interleaved needs chunks of 2 or more and pipeline of 2 or more, not {plan.chunks} and {p}"
    if plan.schedule == "interleaved" and m % p:
        yield f"interleaved needs micro-batches in multiples of pipeline = {p}, not {m}"
    if p == 1 and plan.schedule not in ("1f1b", "interleaved"):
        yield f"{plan.schedule} is a schedule of several stages, pipeline is 1; use 1f1b"
    if plan.schedule == "dualpipe" and p > 1 and (p % 2 or m % 2 or m < 2 * p):
        yield (
            f"dualpipe needs an even pipeline and an even number of micro-batches of at least {2 * p}, not {p} and {m}"
        )
    if plan.schedule == "dualpipev" and p > 1 and m < 2 * p:
        yield f"dualpipev needs at least {2 * p} micro-batches, not {m}"
