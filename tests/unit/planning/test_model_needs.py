"""What a model needs, as a library: parts agree with the modules that own them, and wrong uses are one line."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.model_configs import DEEPSEEK_V3, LLAMA_13B

from fireflyer.base.errors import UsageError
from fireflyer.codesign.decoding import decode_reads, token_seconds
from fireflyer.codesign.model import count_parameters, shape_from_config
from fireflyer.planning import ModelUse, plan_model

DENSE, SPARSE = shape_from_config(LLAMA_13B), shape_from_config(DEEPSEEK_V3)


def test_a_dense_model_has_no_experts_and_no_predictions() -> None:
    answer = plan_model(DENSE)
    assert answer.parameters == count_parameters(DENSE)
    assert (answer.experts, answer.speculation, answer.service) == (None, (), None)
    assert answer.weight_bytes["bf16"] == 2 * answer.parameters.total
    assert answer.kv_sequence_bytes == 4096 * answer.kv_token_bytes
    assert answer.request_tokens_per_s["fp8"] == pytest.approx(
        1555e9 / decode_reads(DENSE, 1, 4096, weight_bytes=1).total
    )
    assert plan_model(SPARSE).machine_tokens_per_s["DGX Spark"] is None
    with pytest.raises(AttributeError, match="immutable"):
        answer.kv_token_bytes = 0  # type: ignore[misc]


def test_limits_of_experts_are_those_of_the_paper() -> None:
    experts = plan_model(SPARSE).experts
    assert experts is not None
    assert experts.exchange_tokens_per_s == pytest.approx(66.2, abs=0.05), "2.3.2 with a hidden size of 7168"
    assert experts.exchange_tokens_per_s == 1 / token_seconds(61, experts.exchange_s)
    assert experts.helped_exchange_s == pytest.approx(experts.exchange_s * 19 / 27), "9 copies: 1 + 18 of 9 + 18 bytes"
    assert experts.serial_tokens_per_s < experts.tokens_per_s <= experts.exchange_tokens_per_s
    assert (experts.nodes_per_token, experts.wire_bytes["bf16"]) == (4, 14_336)
    assert experts.dispatch_s is not None
    assert experts.node_dispatch_s == pytest.approx(experts.dispatch_s / 2), "4 t instead of 8 t"
    wider = plan_model(SPARSE, ModelUse(nodes_per_token=6, inside_bytes_per_s=40e9)).experts
    assert wider is not None
    assert wider.nodes_per_token == 6
    assert wider.node_dispatch_s == pytest.approx(max(6 * 7168 / 50e9, 8 * 7168 / 40e9)), "forwarding is slower"
    assert SPARSE.experts is not None
    alike = msgspec.structs.replace(SPARSE, experts=msgspec.structs.replace(SPARSE.experts, groups=1))
    anywhere = plan_model(alike).experts
    assert anywhere is not None
    assert (anywhere.nodes_per_token, anywhere.dispatch_s, anywhere.node_dispatch_s) == (None, None, None)


def test_lent_sms_take_their_share_of_prefill() -> None:
    whole, lent = (plan_model(SPARSE, ModelUse(gpu_flops=4e14, lent_sms=sms)).service for sms in (0, 33))
    assert whole is not None
    assert lent is not None
    assert (whole.compute_share, lent.compute_share) == (1, 0.75)
    assert lent.prefill_tokens_per_s == pytest.approx(0.75 * whole.prefill_tokens_per_s)
    assert lent.decode_tokens_per_s == whole.decode_tokens_per_s
    assert lent.split.prefill_share > whole.split.prefill_share


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"sequence_tokens": 0}, "sequence_tokens is 0; give a number above 0"),
        ({"memory_bytes_per_s": float("inf")}, "memory_bytes_per_s is inf"),
        ({"network_bytes_per_s": float("nan")}, "network_bytes_per_s is nan"),
        ({"gpu_flops": -1.0}, "gpu_flops is -1.0"),
        ({"batch_tokens": -1}, "batch_tokens is -1"),
        ({"answer_tokens": 0}, "answer_tokens is 0"),
        ({"lent_sms": 132}, "132 of 132 SMs are lent to communication; leave 1 or more"),
    ],
)
def test_a_wrong_use_is_one_line(values: dict[str, float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ModelUse(**values)  # type: ignore[arg-type]
