"""Lines of `ff train plan` about experts on ranks by measured loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from fireflyer.base.units import format_bytes
from fireflyer.codesign.model import ModelShape
from fireflyer.codesign.model.parameters import layer_parameters
from fireflyer.codesign.parallel import PlanFile
from fireflyer.codesign.parallel.expert_replicas import ReplicatedExperts
from fireflyer.codesign.parallel.plan import FORMAT_BYTES

__all__ = ["expert_lines"]

MOST_NAMED: Final = 12
"""Experts of a gate that a line names; JSON has all."""


def expert_lines(given: PlanFile, shape: ModelShape, found: Mapping[str, ReplicatedExperts]) -> Iterator[str]:
    """What copies cost, and for each gate the load of the fullest rank and which experts are copied."""
    measured, experts, plan = given.experts, shape.experts, given.plan
    if measured is None or experts is None:
        return
    if measured.copies:
        each = measured.copies // plan.expert
        one = layer_parameters(shape, shape.layers - 1).routed // experts.routed
        size = each * one * FORMAT_BYTES[plan.precision.parameters]
        yield (
            f"{measured.copies} copies on {plan.expert} ranks: {each} on each, {format_bytes(size)} of parameters for "
            "each layer with experts (planned only: the trainer keeps one of each)"
        )
    for gate, one_gate in found.items():
        line = (
            f"{gate}: load of the fullest rank {one_gate.before:.2f} of the mean as experts are numbered, "
            f"{one_gate.moved:.2f} with experts moved"
        )
        yield line + (f", {one_gate.after:.2f} with copies of {_copied(one_gate)}" if measured.copies else "")


def _copied(found: ReplicatedExperts) -> str:
    more = sorted((one for one, count in enumerate(found.copies) if count > 1), key=lambda one: -found.copies[one])
    named = ", ".join(f"{one} (x{found.copies[one]})" for one in more[:MOST_NAMED])
    rest = f" and {len(more) - MOST_NAMED} more" if len(more) > MOST_NAMED else ""
    return f"{named}{rest}" if more else "none, which help nothing"
