"""Experts on several ranks give the sums and gradients of a dense layer that has all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.collectives.thread_ranks import together

from fireflyer.base.errors import UsageError
from fireflyer.collectives import Communicator
from fireflyer.collectives.dispatch import ExpertPlacement
from fireflyer.recipes.deepseek import Routing
from fireflyer.training.experts import ExpertDispatch
from fireflyer.training.experts.layers import RankDispatch

NODES = [0, 0, 1, 1]
EXPERTS, PER_TOKEN, WIDTH, TOKENS = 8, 3, 16, [5, 0, 7, 2]


class Layer:
    """Router and experts, the same on all ranks; `chosen` are the experts of each token."""

    def __init__(self, dtype: torch.dtype) -> None:
        rng = torch.Generator().manual_seed(3)  # its own: ranks are threads

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()

        self.router = drawn(WIDTH, EXPERTS)
        self.experts = drawn(EXPERTS, WIDTH, WIDTH)
        self.tokens = [drawn(count, WIDTH) for count in TOKENS]

    def routes(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = torch.sigmoid(tokens @ self.router).topk(PER_TOKEN)
        return chosen, weights

    def dense(self) -> torch.Tensor:
        """The loss over all ranks."""
        total = torch.zeros((), dtype=self.router.dtype)
        for tokens in self.tokens:
            chosen, weights = self.routes(tokens)
            every = torch.tanh(torch.einsum("tw,ewv->tev", tokens, self.experts))
            picked = every.gather(1, chosen[..., None].expand(-1, -1, WIDTH))
            total = total + ((picked * weights[..., None]).sum(1) ** 2).sum()
        return total

    def spread(self, comm: Communicator, dispatch: ExpertDispatch, placement: ExpertPlacement) -> torch.Tensor:
        """The loss of this rank's tokens."""
        tokens = self.tokens[comm.rank]
        chosen, weights = self.routes(tokens)
        arrived = dispatch.start(tokens, chosen, weights).wait()
        parts = zip(placement.experts_of(comm.rank), torch.split(arrived.rows, arrived.counts), strict=True)
        outputs = torch.cat([torch.tanh(rows @ self.experts[int(expert)]) for expert, rows in parts])
        weighted = (outputs * arrived.weights[:, None]).to(outputs.dtype)
        return (dispatch.start_combine(weighted, arrived).wait() ** 2).sum()


def losses_and_gradients(placement: ExpertPlacement, dtype: torch.dtype, codecs: tuple[str, str]) -> list[Any]:
    def body(comm: Communicator) -> list[torch.Tensor]:
        layer = Layer(dtype)
        dispatch = ExpertDispatch(
            comm, placement, width=WIDTH, per_token=PER_TOKEN, max_tokens=8, dtype=dtype,
            dispatch_codec=codecs[0], combine_codec=codecs[1],
        )  # fmt: skip
        loss = layer.spread(comm, dispatch, placement)
        torch.autograd.backward(loss)
        dispatch.close()
        found = [loss.detach(), layer.tokens[comm.rank].grad, layer.router.grad, layer.experts.grad]
        assert all(one is not None for one in found)
        return [one for one in found if one is not None]

    # The backward pass of CPU tensors runs in the thread that calls it: ranks do not hold each other up.
    return together(placement.node_of_rank.tolist(), body)


@pytest.mark.parametrize("rank_of_expert", [[0, 0, 1, 1, 2, 2, 3, 3], [3, 1, 1, 0, 2, 0, 3, 1]], ids=["even", "uneven"])
def test_in_fp64_loss_and_gradients_are_those_of_the_dense_layer(rank_of_expert: list[int]) -> None:
    dense = Layer(torch.float64)
    loss = dense.dense()
    torch.autograd.backward(loss)
    found = losses_and_gradients(ExpertPlacement(rank_of_expert, NODES), torch.float64, ("f64", "f64"))
    assert not [error for error in found if isinstance(error, BaseException)]
    assert dense.router.grad is not None
    assert dense.experts.grad is not None

    def close(one: torch.Tensor, other: torch.Tensor) -> bool:
        return float((one - other).norm()) <= 1e-10 * float(other.norm())

    assert close(torch.stack([one[0] for one in found]).sum(), loss.detach())
    for rank, tokens in enumerate(dense.tokens):
        assert tokens.grad is not None
        assert close(found[rank][1], tokens.grad)
    assert close(torch.stack([one[2] for one in found]).sum(0), dense.router.grad)
    assert close(torch.stack([one[3] for one in found]).sum(0), dense.experts.grad)


def test_bf16_tokens_travel_and_two_runs_have_equal_bits() -> None:
    placement = ExpertPlacement.even(EXPERTS, NODES)
    runs = [losses_and_gradients(placement, torch.bfloat16, ("bf16", "bf16")) for _ in range(2)]
    for one, other in zip(*runs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_tensors_of_another_type_are_refused() -> None:
    def body(comm: Communicator) -> None:
        placement = ExpertPlacement.even(4, [0])
        with pytest.raises(UsageError, match=r"tokens of torch\.float16 cannot be dispatched"):
            ExpertDispatch(comm, placement, width=4, per_token=1, max_tokens=1, dtype=torch.float16)
        dispatch = ExpertDispatch(comm, placement, width=4, per_token=1, max_tokens=1)
        with pytest.raises(UsageError, match=r"are torch\.float32 on cpu; this dispatch carries torch\.bfloat16"):
            dispatch.start(torch.zeros(1, 4), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
        dispatch.close()

    assert together([0], body) == [None]


def test_results_of_another_dtype_are_sent_in_that_of_the_exchange() -> None:
    """Under autocast experts compute in bf16, and tokens stay in fp32."""

    def body(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        placement = ExpertPlacement.even(4, [0])
        exchange = ExpertDispatch(
            comm, placement, width=4, per_token=1, max_tokens=2, dtype=torch.float32, dispatch_codec="f32",
            combine_codec="f32",
        )  # fmt: skip
        dispatch = RankDispatch(exchange)
        tokens = torch.randn(2, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        routing = Routing(torch.tensor([[0], [2]]), torch.tensor([[0.5], [0.25]]))
        arrived = dispatch.dispatch(tokens, routing).wait()
        total = dispatch.combine(arrived.rows.bfloat16(), arrived).wait()
        total.sum().backward()  # type: ignore[no-untyped-call]
        exchange.close()
        assert tokens.grad is not None
        assert torch.equal(tokens.grad, torch.tensor([[0.5], [0.25]]).expand(2, 4))
        return total, tokens.detach().bfloat16().float() * routing.weights

    ((found, wanted),) = together([0], body)
    assert found.dtype == torch.float32
    assert torch.equal(found, wanted)
