"""Bytes that a plan states for the exchange of tokens: rows of a dispatch, in each wire format."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from tests.support.model_configs import DEEPSEEK_MOE_16B

from fireflyer.codesign.model import Experts, shape_from_config
from fireflyer.codesign.parallel import ParallelPlan, Precision, load_node, shape_refusals
from fireflyer.codesign.parallel.experts import copies_per_token
from fireflyer.codesign.parallel.plan import WireFormat
from fireflyer.codesign.parallel.traffic import stage_traffic
from fireflyer.collectives.dispatch import ExpertPlacement
from fireflyer.collectives.dispatch.traffic import Traffic, traffic
from fireflyer.collectives.tokens import TOKEN_CODECS, token_codec

MOE = shape_from_config(DEEPSEEK_MOE_16B)


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 2), (1, 4), (2, 2), (4, 2)])
def test_rows_of_uniform_routing_are_those_that_dispatch_sends(nodes: int, per_node: int) -> None:
    experts = Experts(routed=16, per_token=3, feed_forward=1)
    ranks, tokens = nodes * per_node, 1500
    node_of_rank = [rank // per_node for rank in range(ranks)]
    rng = np.random.default_rng(nodes + per_node)
    chosen = [np.argsort(rng.random((tokens, experts.routed)))[:, : experts.per_token] for _ in range(ranks)]
    placement = ExpertPlacement.even(experts.routed, node_of_rank)

    def rows(there: int, back: int) -> Traffic:
        found, none = (
            traffic(chosen, placement, dispatch_row_bytes=one, combine_row_bytes=other)
            for one, other in ((there, back), (0, 0))
        )
        return Traffic(found.dispatch - none.dispatch, found.combine - none.combine)

    plan = ParallelPlan(replicate=ranks, expert=ranks, sequence_tokens=1, batch_sequences=ranks)
    expected, found = copies_per_token(plan, experts, per_node), rows(1, 1)
    abroad = np.not_equal.outer(node_of_rank, node_of_rank)
    total = ranks * tokens
    assert found.dispatch[abroad].sum() / total == pytest.approx(expected.remote, rel=0.02)
    assert found.combine[abroad].sum() / total == pytest.approx(expected.remote, rel=0.02)
    assert found.dispatch[~abroad].sum() / total == pytest.approx(expected.inside, rel=0.02)
    assert found.combine[~abroad].sum() / total == pytest.approx(expected.outputs, rel=0.02)


@pytest.mark.parametrize("form", get_args(WireFormat))
def test_a_plan_counts_the_bytes_of_each_wire_format(form: WireFormat) -> None:
    """All codecs but that of FP64 may be chosen."""
    codec = token_codec("f32" if form == "fp32" else form)
    plan = ParallelPlan(
        replicate=2, expert=2, sequence_tokens=128, batch_sequences=2, precision=Precision(dispatch=form, combine=form)
    )
    assert shape_refusals(plan, MOE) == []
    assert plan.precision.dispatch_bytes(MOE.hidden) == plan.precision.combine_bytes(MOE.hidden)
    assert plan.precision.dispatch_bytes(MOE.hidden) == codec.row_bytes(MOE.hidden)
    node = msgspec.structs.replace(load_node("pcie-a100"), gpus=2, nvlink_gpus=1)
    usual = msgspec.structs.replace(plan, precision=Precision())
    sent, bf16 = (stage_traffic(one, MOE, node, 0).by_purpose["experts"]["pcie"] for one in (plan, usual))
    assert sent / bf16 == pytest.approx(codec.row_bytes(MOE.hidden) / (2 * MOE.hidden))


def test_every_codec_is_a_wire_format() -> None:
    assert {"f32" if form == "fp32" else form for form in get_args(WireFormat)} == {*TOKEN_CODECS} - {"f64"}


def test_tokens_travel_as_the_parameters_are_unless_the_plan_says_otherwise() -> None:
    kinds: list[tuple[dict[str, Any], int]] = [({}, 2), ({"parameters": "fp32"}, 4), ({"dispatch": "fp32"}, 4)]
    for precision, value in kinds:
        assert Precision(**precision).dispatch_bytes(7168) == value * 7168


def test_tiles_of_tokens_must_be_full() -> None:
    odd = msgspec.structs.replace(MOE, hidden=2000)
    plan = ParallelPlan(
        replicate=2, expert=2, sequence_tokens=128, batch_sequences=2, precision=Precision(combine="logfmt8")
    )
    assert shape_refusals(plan, odd) == [
        "precision.combine = 'logfmt8' has tiles of 128 values, and hidden states have 2000"
    ]
