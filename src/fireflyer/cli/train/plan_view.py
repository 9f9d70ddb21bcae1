"""What `ff train plan` prints: tables for people, the same as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fireflyer.base.units import format_bytes
from fireflyer.cli.output import stdout_console
from fireflyer.cli.train.plan_experts import expert_lines
from fireflyer.codesign.model import (
    ModelShape,
    count_parameters,
    dense_flops,
    kv_bytes_per_token,
    training_flops,
)
from fireflyer.codesign.parallel import (
    MeasuredStep,
    NodeModel,
    ParallelPlan,
    PlanFile,
    RankMemory,
    SearchResult,
    StepEstimate,
    balance_model,
    coordinates_of,
    gradient_adds,
    mesh_dims,
)
from fireflyer.codesign.parallel.expert_replicas import replicate_layers
from fireflyer.codesign.parallel.layout import pipeline_layout
from fireflyer.codesign.parallel.recompute_fit import recompute_text
from fireflyer.recipes.trainer.core.checks import plan_reasons

__all__ = ["PlanView"]

PART_NAMES = {
    "compute": "computation of the slowest stage",
    "tensor": "tensor parallelism",
    "experts": "all-to-all that is not hidden",
    "bubble": "bubble",
    "sends": "sends between stages",
    "gradients": "gradients and parameters that are not hidden",
    "optimizer": "optimizer",
    "waiting": "waiting for the busiest link",
}
LINK_NAMES = {
    "nvlink": "NVLink, one GPU",
    "pcie": "PCIe, one GPU",
    "host_bridge": "host bridge, both directions",
    "host_memory": "host memory, one node",
    "nic": "NICs, one node",
}


class PlanView:
    """A plan with its prediction, as `ff train plan` shows them."""

    def __init__(
        self,
        given: PlanFile,
        shape: ModelShape,
        node: NodeModel,
        nodes: int,
        memory: tuple[RankMemory, ...],
        estimate: StepEstimate,
    ) -> None:
        self.given, self.shape, self.node, self.nodes = given, shape, node, nodes
        self.memory, self.estimate = memory, estimate
        self.layout = pipeline_layout(given.plan, shape, node)
        self.refused = plan_reasons(given.plan)
        measured = given.experts
        self.experts = {} if measured is None else replicate_layers(measured, given.plan, shape.experts, node.gpus)

    def to_json(self, found: SearchResult | None) -> bytes:
        """Of `ff train plan --json`."""
        plan, shape, estimate = self.given.plan, self.shape, self.estimate
        dense, expert = gradient_adds(plan, self.node.gpus)
        shown: dict[str, object] = {
            "plan": plan,
            "nodes": self.nodes,
            "node": self.node.name,
            "model": {
                "model_type": shape.model_type,
                **msgspec.structs.asdict(count_parameters(shape)),
                "kv_bytes_per_token": kv_bytes_per_token(shape),
                "flops_per_token": self._flops(),
            },
            "mesh": dict(mesh_dims(plan)),
            "stages": self._stages(),
            "gradients_added_on_node": {"dense": dense, "experts": expert},
            "pipeline_layout": self.layout,
            "trainer_refuses": self.refused,
            "step_s": estimate.step_s,
            "estimate": estimate,
        }
        if self.experts:
            shown["experts"] = self.experts
        if self.given.measured is not None:
            shown["measured"] = self._measured(self.given.measured)
        if found is not None:
            shown["search"] = found
        return msgspec.json.format(msgspec.json.encode(shown), indent=2)

    def _flops(self) -> dict[str, float]:
        tokens = self.given.plan.sequence_tokens
        return {
            "causal": training_flops(self.shape, tokens),
            "non_causal": training_flops(self.shape, tokens, causal=False),
            "dense_convention": dense_flops(self.shape),
        }

    def _stages(self) -> list[dict[str, object]]:
        pieces = balance_model(self.shape, self.given.plan.pieces, self.given.plan.sequence_tokens)
        return [
            {
                "layers": [_layers(pieces[piece].first, pieces[piece].layers) for piece in self._held(one.stage)],
                "embedding": any(pieces[piece].embedding for piece in self._held(one.stage)),
                "head": any(pieces[piece].head for piece in self._held(one.stage)),
                "memory": one,
                "total_bytes": one.total,
            }
            for one in self.memory
        ]

    def _held(self, stage: int) -> tuple[int, ...]:
        return self.given.plan.pieces_of(stage)

    def _measured(self, measured: MeasuredStep) -> dict[str, float]:
        peak = self.node.peak_flops.bf16
        flops = self._flops()
        return {
            "parts_s": measured.parts_s,
            "step_s": measured.step_s,
            "step_tokens": measured.step_tokens,
            "mfu": measured.utilization(flops["causal"], peak),
            "mfu_non_causal": measured.utilization(flops["non_causal"], peak),
        }

    def print(self, found: SearchResult | None) -> None:
        """The tables, on standard output."""
        console = stdout_console()
        _section(console, "Model", self._model_lines())
        _section(console, "Placement", self._placement_lines())
        if self.experts:
            _section(console, "Experts by measured loads", expert_lines(self.given, self.shape, self.experts))
        console.print()
        console.print(self._memory_table())
        console.print()
        console.print(self._link_table())
        console.print()
        console.print(self._step_table())
        _section(console, "Result", self._result_lines())
        if found is not None:
            self._print_search(console, found)

    def _model_lines(self) -> Iterator[str]:
        count, flops = count_parameters(self.shape), self._flops()
        extra = f", {_billions(count.mtp)} more of multi-token prediction" if count.mtp else ""
        yield f"{self.shape.model_type}: {_billions(count.total)} parameters, {_billions(count.active)} active{extra}"
        yield (
            f"training FLOPs per token: {flops['causal'] / 1e9:.2f} G causal, {flops['non_causal'] / 1e9:.2f} G "
            f"non-causal, {flops['dense_convention'] / 1e9:.2f} G by 6 (12 L h^2 + V h)"
        )
        yield f"KV cache: {kv_bytes_per_token(self.shape) / 1e3:.3f} kB per token in BF16"

    def _placement_lines(self) -> Iterator[str]:
        plan, node = self.given.plan, self.node
        sizes = " x ".join(f"{name} {size}" for name, size in mesh_dims(plan))
        yield f"{sizes} = {plan.world_size} GPUs on {self.nodes} nodes of {node.name}; expert {plan.expert}"
        places = [coordinates_of(plan, rank) for rank in range(node.gpus)]
        stages = sorted({one.pipeline for one in places})
        ranks = len({(one.replicate, one.shard) for one in places})
        held = f"stage {stages[0]}" if len(stages) == 1 else f"stages {stages[0]} to {stages[-1]}"
        yield f"GPUs of the first node: {ranks} data-parallel ranks of {held}"
        dense, expert = gradient_adds(plan, node.gpus)
        yield f"gradients that a node adds before the NIC: {dense} (8 / tensor on a node of 8 GPUs)"
        if plan.expert > 1:
            yield (
                f"gradients of experts: {expert} on a node, over the {plan.expert_data} ranks of a stage with the same "
                "experts"
            )
        yield f"micro-batches: {plan.micro_batches} of {plan.micro_batch_tokens} tokens on each data-parallel rank"
        if self.layout is not None:
            yield f"layout of the {self.layout.sharing} pipelines that share a NIC: {self.layout.reason}"
            if self.layout.layout != "lockstep":
                yield (
                    f"planned only: the trainer starts all at once, as in lockstep, which takes "
                    f"{self.layout.slowdowns['lockstep']:.2f} of the time without messages; the predicted step is that "
                    "of pipelines apart"
                )
        if isinstance(plan.recompute, tuple):
            yield f"recompute, by layer: {recompute_text(plan)}"

    def _memory_table(self) -> Table:
        table = _table("stage", "layers", "parameters", "gradients", "optimizer", "activations", "working", "total")
        pieces = balance_model(self.shape, self.given.plan.pieces, self.given.plan.sequence_tokens)
        for one in self.memory:
            held = [pieces[piece] for piece in self._held(one.stage)]
            layers = ", ".join(_layers(piece.first, piece.layers) for piece in held if piece.layers)
            layers += "".join(
                f" +{name}" for name in ("embedding", "head") if any(getattr(piece, name) for piece in held)
            )
            counts = (one.parameters, one.gradients, one.states, one.activations, one.working, one.total)
            table.add_row(str(one.stage), layers.strip(), *(format_bytes(count) for count in counts))
        return table

    def _link_table(self) -> Table:
        table = _table("link", "stage", "bytes per step", "time", "of the step", "most of it")
        for one in self.estimate.links:
            table.add_row(
                LINK_NAMES[one.link],
                str(one.stage),
                f"{one.bytes / 1e9:.2f} GB",
                f"{one.seconds:.3f} s",
                f"{one.seconds / self.estimate.step_s:.0%}",
                self._purposes(one.link),
            )
        return table

    def _purposes(self, link: str) -> str:
        """Purposes of what is sent over a link at the stage that is limited most, largest first."""
        counts = {
            purpose: counts[known]
            for purpose, counts in self.estimate.traffic.by_purpose.items()
            for known in counts
            if known == link and counts[known]
        }
        total = sum(counts.values())
        order = sorted(counts, key=lambda purpose: -counts[purpose])
        return ", ".join(f"{purpose} {counts[purpose] / total:.0%}" for purpose in order[:3])

    def _step_table(self) -> Table:
        table = _table("part of the step", "time", "share")
        for name, text in PART_NAMES.items():
            seconds = getattr(self.estimate.parts, name)
            if seconds:
                table.add_row(text, f"{seconds:.3f} s", f"{seconds / self.estimate.step_s:.1%}")
        table.add_row("step", f"{self.estimate.step_s:.3f} s", "")
        return table

    def _result_lines(self) -> Iterator[str]:
        estimate, node = self.estimate, self.node
        yield (
            f"predicted step: {estimate.step_s:.3f} s, {estimate.tokens_per_s / self.given.plan.world_size:,.0f} "
            f"tokens/s per GPU, MFU {estimate.mfu:.2%} causal, {estimate.mfu_non_causal:.2%} non-causal"
        )
        if estimate.limit == "compute":
            yield f"limit: computation of stage {estimate.slowest_stage}; no link is busy for longer"
        else:
            yield f"limit: {LINK_NAMES[estimate.limit]}, which is busy for longer than the GPUs compute"
        peak = estimate.peak_memory
        room = f"{format_bytes(peak.total)} of {format_bytes(node.usable_bytes)} on stage {peak.stage}"
        if estimate.fits:
            yield f"memory: fits, {room}"
        else:
            yield f"memory: does not fit, {room}; use more stages, a larger shard, or more recomputation"
        if self.refused:
            yield f"planned only: the trainer refuses {'; '.join(self.refused)}"
        if (measured := self.given.measured) is not None:
            shown = self._measured(measured)
            yield (
                f"measured: parts {shown['parts_s']:.2f} s of a step of {measured.step_s:.3f} s, MFU "
                f"{shown['mfu']:.2%} causal, {shown['mfu_non_causal']:.2%} non-causal; predicted step "
                f"{estimate.step_s / measured.step_s - 1:+.1%}"
            )

    def _print_search(self, console: Console, found: SearchResult) -> None:
        _section(
            console,
            "Search",
            [
                f"{found.enumerated:,} plans: {found.refused:,} refused by divisibility, {found.out_of_memory:,} do "
                f"not fit, {found.bounded:,} cannot be faster than those kept, {found.simulated:,} simulated"
            ],
        )
        names = ("rank", "step", "MFU", "memory", "pipeline", "data", "shard", "tensor", "expert")
        table = _table(*names, "micro", "schedule", "recompute")
        for rank, one in enumerate(found.ranked, 1):
            table.add_row(str(rank), *_plan_cells(one.plan, one.estimate))
        if found.faster is not None and self.estimate.fits:
            table.add_row("this", *_plan_cells(self.given.plan, self.estimate))
        console.print(table)
        for line in self._rank_lines(found):
            console.print(Text(line), soft_wrap=True)

    def _rank_lines(self, found: SearchResult) -> Iterator[str]:
        if not found.ranked:
            yield "no plan fits; use more nodes"
            return
        if found.faster is None or not self.estimate.fits:
            return
        best, mine = found.ranked[0].estimate, self.estimate
        yield f"rank of this plan: {found.faster + 1}; the best is {mine.step_s - best.step_s:.3f} s faster, by part:"
        for name, text in PART_NAMES.items():
            difference = getattr(mine.parts, name) - getattr(best.parts, name)
            if abs(difference) >= 0.0005:
                yield f"  {text}: {difference:+.3f} s"


def _section(console: Console, title: str, lines: Iterator[str] | list[str]) -> None:
    console.print()
    console.print(Text(title, style="bold"))
    for line in lines:
        console.print(Text(f"  {line}"), soft_wrap=True)


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    left = {"layers", "link", "part of the step", "most of it", "schedule", "recompute", "rank"}
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return table


def _plan_cells(plan: ParallelPlan, estimate: StepEstimate) -> list[str]:
    schedule = f"{plan.schedule} x{plan.chunks}" if plan.chunks > 1 else plan.schedule
    degrees = (plan.pipeline, plan.data, plan.shard, plan.tensor, plan.expert, plan.micro_batch)
    memory = format_bytes(estimate.peak_memory.total)
    return [
        f"{estimate.step_s:.3f} s",
        f"{estimate.mfu:.1%}",
        memory,
        *map(str, degrees),
        schedule,
        plan.recompute if isinstance(plan.recompute, str) else "by layer",
    ]


def _layers(first: int, count: int) -> str:
    return f"{first}-{first + count - 1}" if count > 1 else str(first) if count else ""


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"
