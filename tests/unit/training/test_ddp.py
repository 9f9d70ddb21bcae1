"""DistributedDataParallel: ranks that share a batch end with the gradients of one process on the whole of it."""

import copy
import gc
from typing import Any

import pytest
import torch
from tests.support.collectives.ddp_threads import (
    Gradients,
    TwoHeads,
    assert_close,
    batch,
    gradients,
    network,
    run,
    same_bits,
    seeded,
    share,
    single_process,
)
from tests.support.collectives.thread_world import ThreadCommunicator, run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from fireflyer.base.errors import UsageError
from fireflyer.checkpoint import capture, load_into
from fireflyer.training import DistributedDataParallel as Ddp
from fireflyer.training.replicas import broadcast_tensors


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("bucket_bytes", [1, 400, 1 << 20])
def test_gradients_are_those_of_one_process_on_the_whole_batch(size: int, bucket_bytes: int) -> None:
    def body(comm: ThreadCommunicator) -> Gradients:
        model = Ddp(network(seed=comm.rank), comm, bucket_bytes=bucket_bytes)
        model(share(batch(), comm)).square().mean().backward()
        return gradients(model.module)

    results = run(size, body)
    assert all(same_bits(result, results[0]) for result in results)
    assert_close(results[0], single_process(network(seed=0), batch()))


def test_training_twice_gives_the_same_bits() -> None:
    def body(comm: ThreadCommunicator) -> Gradients:
        model = Ddp(network(), comm, bucket_bytes=700)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(5):
            optimizer.zero_grad()
            model(share(batch(seed=step), comm)).square().mean().backward()
            optimizer.step()
        return {name: p.detach().clone() for name, p in model.module.named_parameters()}

    first, second = run(3, body), run(3, body)
    assert all(same_bits(a, first[0]) for a in [*first, *second])
    assert not same_bits(first[0], {name: p.detach() for name, p in network().named_parameters()})


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_either_kind_leaves_no_trace_of_the_last_step(set_to_none: bool) -> None:
    def body(comm: ThreadCommunicator) -> Gradients:
        model = Ddp(network(), comm)
        for seed in (5, 1):
            model.zero_grad(set_to_none=set_to_none)
            model(share(batch(seed=seed), comm)).square().mean().backward()
        return gradients(model.module)

    assert_close(run(2, body)[0], single_process(network(), batch(seed=1)))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_no_sync_accumulates_and_the_next_pass_averages_the_sum(set_to_none: bool) -> None:
    def body(comm: ThreadCommunicator) -> tuple[Gradients, int]:
        model = Ddp(network(), comm)
        model.zero_grad(set_to_none=set_to_none)
        before = len(comm.started)
        with model.no_sync():
            with model.no_sync():
                model(share(batch(seed=1), comm)).square().mean().backward()
            model(share(batch(seed=2), comm)).square().mean().backward()
        silent = len(comm.started) - before
        model(share(batch(seed=3), comm)).square().mean().backward()
        return gradients(model.module), silent

    expected = network()
    for seed in (1, 2, 3):
        expected(batch(seed=seed)).square().mean().backward()
    for result, silent in run(2, body):
        assert silent == 0
        assert_close(result, gradients(expected))


def test_allreduces_start_during_backward_in_the_same_order_on_every_rank() -> None:
    def body(comm: ThreadCommunicator) -> list[str]:
        model = Ddp(network(), comm, bucket_bytes=1)
        events: list[str] = []
        comm.on_start = lambda kind: events.append(kind.split()[0])
        first = model.module.get_submodule("0").weight
        assert isinstance(first, nn.Parameter)
        first.register_hook(lambda grad: events.append("first layer"))  # type: ignore[no-untyped-call]
        model(share(batch(), comm)).square().mean().backward()
        assert [names for (names,) in model.buckets] == [
            "4.bias",
            "4.weight",
            "2.bias",
            "2.weight",
            "0.bias",
            "0.weight",
        ]
        stats = model.stats()
        assert (stats.passes, stats.allreduces, stats.allreduces_during_backward) == (1, 6, 6)
        assert stats.reduced_bytes == 4 * (sum(p.numel() for p in model.parameters()) + 1)
        return events

    for events in run(2, body):
        assert events.index("first layer") >= 4
        assert events.count("allreduce") == 6


def test_buckets_start_in_order_though_gradients_come_out_of_order() -> None:
    class Backwards(nn.Module):
        """Uses its last layer first, so that gradients come in an order that buckets do not expect."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return self.a(self.b(x))

    def body(comm: ThreadCommunicator) -> tuple[Gradients, list[str]]:
        model = Ddp(seeded(Backwards), comm, bucket_bytes=1)
        before = len(comm.started)
        model(share(batch(), comm)).square().mean().backward()
        return gradients(model.module), comm.started[before:]

    expected = single_process(seeded(Backwards), batch())
    for result, started in run(2, body):
        assert started == [f"allreduce float32 {n}" for n in (4, 24, 4, 17)]
        assert_close(result, expected)


def test_shared_frozen_and_mixed_parameters() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Linear(6, 6, bias=False)
            self.decode = nn.Linear(6, 6, bias=False)
            self.decode.weight = self.encode.weight
            self.frozen = nn.Linear(6, 6).requires_grad_(False)
            self.wide = nn.Linear(6, 2, dtype=torch.float64)
            self.narrow = nn.Linear(6, 2, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            x = self.decode(self.frozen(self.encode(x)).tanh())
            return {"outputs": [self.wide(x.double()), (self.narrow(x.bfloat16()),)], "rows": torch.tensor(len(x))}

    def loss(output: dict[str, Any]) -> Any:
        wide, (narrow,) = output["outputs"]
        return wide.square().mean() + narrow.double().square().mean()

    def body(comm: ThreadCommunicator) -> Gradients:
        model = Ddp(seeded(Mixed, comm.rank), comm, bucket_bytes=100)
        loss(model(share(batch(), comm))).backward()
        return gradients(model.module)

    expected = seeded(Mixed)
    loss(expected(batch())).backward()
    for result in run(2, body):
        assert set(result) == {"encode.weight", "wide.weight", "wide.bias", "narrow.weight", "narrow.bias"}
        for name, gradient in gradients(expected).items():
            tolerance = 2e-2 if gradient.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(result[name], gradient, rtol=tolerance, atol=tolerance)


def test_unused_parameters_count_as_zero_on_request() -> None:
    def body(comm: ThreadCommunicator) -> Gradients:
        model = Ddp(seeded(TwoHeads), comm, bucket_bytes=1, find_unused_parameters=True)
        model(share(batch(), comm), "left").backward()
        assert model.module.get_submodule("right").weight.grad is None  # which no rank has used
        model.zero_grad()
        model(share(batch(), comm), ["left", "right"][comm.rank]).backward()
        return gradients(model.module)

    expected = seeded(TwoHeads)
    ((expected(batch()[:6], "left") + expected(batch()[6:], "right")) / 2).backward()
    results = run(2, body)
    assert same_bits(*results)
    assert_close(results[0], gradients(expected))


def test_gradients_of_no_sync_are_averaged_though_the_next_pass_does_not_use_them() -> None:
    def body(comm: ThreadCommunicator) -> Gradients:
        model = Ddp(seeded(TwoHeads), comm, find_unused_parameters=True)
        with model.no_sync():
            model(share(batch(), comm), "right").backward()
        model(share(batch(), comm), "left").backward()
        return gradients(model.module)

    expected = seeded(TwoHeads)
    expected(batch(), "left right").backward()
    assert_close(run(2, body)[0], gradients(expected))


def test_buffers_follow_rank_0_at_each_forward_pass_after_a_synchronised_one() -> None:
    def body(comm: ThreadCommunicator) -> list[torch.Tensor]:
        model = Ddp(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2)), comm)
        norm = model.module.get_submodule("0")
        assert isinstance(norm, nn.BatchNorm1d)
        assert isinstance(norm.running_mean, torch.Tensor)
        seen = []
        for _ in range(2):
            model(share(batch(), comm)).sum().backward()
            seen.append(norm.running_mean.clone())
        model.eval()
        norm.running_mean.fill_(comm.rank)
        with torch.no_grad():
            model(share(batch(), comm))  # the last one was synchronised, as with torch
        seen.append(norm.running_mean.clone())
        started = len(comm.started)
        with torch.no_grad():
            model(share(batch(), comm))
        model.train()
        with model.no_sync():
            model(share(batch(), comm))
        assert len(comm.started) == started
        assert norm.num_batches_tracked is not None
        seen.append(norm.num_batches_tracked.clone())
        return seen

    zero, one = run(2, body)
    assert not torch.equal(zero[0], one[0])
    assert torch.equal(one[2], torch.zeros(6))
    assert zero[3] == one[3]


def test_initial_values_come_from_rank_0_whatever_their_type() -> None:
    class Values(nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(rank)
            self.weight = nn.Parameter(torch.randn(5, 3, generator=generator).t())
            self.scalar = nn.Parameter(torch.tensor(float(rank)))
            self.register_buffer("flags", torch.tensor([rank == 0, True, rank == 1]))
            self.register_buffer("tiny", torch.randn(7, generator=generator).to(torch.float8_e4m3fn))
            self.register_buffer("count", torch.tensor(40 + rank))
            self.register_buffer("wave", torch.randn(3, dtype=torch.complex64, generator=generator))
            self.register_buffer("empty", torch.empty(0))

    def body(comm: ThreadCommunicator) -> dict[str, Any]:
        return dict(Ddp(Values(comm.rank), comm).module.state_dict())

    expected = Values(0).state_dict()
    for state in run(3, body):
        assert state.keys() == expected.keys()
        for name, tensor in state.items():
            assert torch.equal(tensor.reshape(-1).view(torch.uint8), expected[name].reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("staging_bytes", [1, 8, 24, 1000])
def test_values_are_copied_through_a_staging_buffer_of_any_size(staging_bytes: int) -> None:
    def body(comm: ThreadCommunicator) -> list[torch.Tensor]:
        tensors = [torch.full((n,), comm.rank + n, dtype=torch.int16) for n in (3, 0, 17, 1, 8)]
        broadcast_tensors(comm, tensors, staging_bytes=staging_bytes)
        sizes = [int(kind.split()[2]) for kind in comm.started]
        assert max(sizes) <= max(1, staging_bytes // 8)
        assert sum(sizes) == -(-58 // 8)
        return tensors

    for tensors in run(2, body):
        assert [tensor.tolist() for tensor in tensors] == [[n] * n for n in (3, 0, 17, 1, 8)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: torch.Tensor) -> Any:
            x = checkpoint(self.inner[:2], x, use_reentrant=reentrant)
            return checkpoint(self.inner[2:], x, use_reentrant=reentrant)

    def body(comm: ThreadCommunicator) -> Gradients:
        model = Ddp(Checkpointed(), comm, bucket_bytes=1)
        model(share(batch(), comm).requires_grad_()).square().mean().backward()
        return gradients(model.module)

    expected = {f"inner.{name}": gradient for name, gradient in single_process(network(), batch()).items()}
    assert_close(run(2, body)[0], expected)


def test_checkpointing_the_wrapper_itself() -> None:
    def body(comm: ThreadCommunicator) -> Gradients:
        model = Ddp(nn.Sequential(network(), nn.BatchNorm1d(3)), comm, bucket_bytes=1)
        before = len(comm.started)
        checkpoint(model, share(batch(), comm), use_reentrant=False).square().mean().backward()
        assert [kind.split()[0] for kind in comm.started[before:]] == ["broadcast", *["allreduce"] * 8]
        return gradients(model.module)

    results = run(2, body)
    assert len(results[0]) == 8
    assert same_bits(*results)


def test_recomputing_a_forward_pass_after_the_first_allreduces() -> None:
    def body(comm: ThreadCommunicator) -> Gradients:
        model = Ddp(seeded(TwoHeads), comm, bucket_bytes=1)
        left = checkpoint(model, share(batch(), comm), "left", use_reentrant=False)
        (left + model(share(batch(), comm), "right")).backward()
        return gradients(model.module)

    expected = seeded(TwoHeads)
    (expected(batch(), "left") + expected(batch(), "right")).backward()
    assert_close(run(2, body)[0], gradients(expected))


def test_two_forward_passes_before_one_backward() -> None:
    def body(comm: ThreadCommunicator) -> Gradients:
        model = Ddp(network(), comm)
        whole = share(batch(), comm)
        (model(whole).square().mean() + model(whole * 2).square().mean()).backward()
        return gradients(model.module)

    expected = network()
    (expected(batch()).square().mean() + expected(batch() * 2).square().mean()).backward()
    assert_close(run(2, body)[0], gradients(expected))


def test_input_gradients_alone_start_no_allreduce() -> None:
    def body(comm: ThreadCommunicator) -> int:
        model = Ddp(network(), comm)
        before = len(comm.started)
        x = batch().requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
        return len(comm.started) - before

    assert run(2, body) == [0, 0]


def test_names_in_the_state_dict_have_the_prefix_that_torch_gives_them() -> None:
    def body(comm: ThreadCommunicator) -> None:
        model = Ddp(network(seed=3), comm)
        assert list(model.state_dict()) == [f"module.{name}" for name in network().state_dict()]
        assert [name for name, _ in model.named_parameters()] == list(model.state_dict())
        model.load_state_dict({f"module.{name}": value for name, value in network(seed=4).state_dict().items()})
        assert torch.equal(model.module.state_dict()["0.weight"], network(seed=4).state_dict()["0.weight"])
        with pytest.raises(RuntimeError, match=r"Missing key.*module\.0\.weight"):
            model.load_state_dict(network(seed=4).state_dict())

    run(1, body)


def test_dropping_the_wrapper_gives_the_plain_module_back() -> None:
    def body(comm: ThreadCommunicator) -> int:
        module = network()
        model = Ddp(module, comm)
        model(batch()).sum().backward()
        before = len(comm.started)
        del model
        gc.collect()
        assert not any(parameter._post_accumulate_grad_hooks for parameter in module.parameters())
        module(batch()).sum().backward()
        return len(comm.started) - before

    assert run(1, body) == [0]


def test_backward_of_a_forward_pass_that_went_past_the_wrapper_stays_local() -> None:
    def body(comm: ThreadCommunicator) -> int:
        model = Ddp(network(), comm)
        model(batch()).sum().backward()
        before = len(comm.started)
        if comm.rank == 0:  # as an evaluation on one rank
            model.module(batch()).sum().backward()
        return len(comm.started) - before

    assert run(2, body) == [0, 0]


def test_a_second_backward_through_one_forward_pass_is_averaged_too() -> None:
    def body(comm: ThreadCommunicator) -> Gradients:
        model = Ddp(network(), comm)
        loss = model(share(batch(), comm)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model.module)

    results = run(2, body)
    assert same_bits(*results)
    assert_close(results[0], {name: 2 * value for name, value in single_process(network(), batch()).items()})


def test_float16_gradients_whose_average_fits_do_not_overflow_on_the_way() -> None:
    def body(comm: ThreadCommunicator) -> list[float]:
        model = Ddp(nn.Linear(2, 1, bias=False, dtype=torch.float16), comm)
        model(torch.tensor([[40_000.0, 2.0 + comm.rank]], dtype=torch.float16)).sum().backward()
        (weight,) = model.parameters()
        assert weight.grad is not None
        return [float(value) for value in weight.grad.flatten()]

    assert run_ranks(2, body) == [[40_000.0, 2.5]] * 2


def channels_last_convolution() -> nn.Module:
    model: nn.Module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def channels_last_losses(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> list[float]:
    losses = []
    for number in range(seed, seed + 3):
        images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(number))
        loss = model(images).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("fused", [False, True])
def test_parameters_keep_their_memory_format_in_gradients_and_restored_moments(fused: bool) -> None:
    base = channels_last_convolution()

    def make() -> nn.Module:
        return copy.deepcopy(base)

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=fused)

    def body(comm: ThreadCommunicator) -> list[float]:
        model = Ddp(make(), comm)
        optimizer = optimizer_of(model)
        losses = channels_last_losses(model, optimizer, 0)
        state = capture(model, optimizer, rng=False)
        row_major = {name: value.clone(memory_format=torch.contiguous_format) for name, value in state.shared.items()}
        again = Ddp(make(), comm)
        optimizer = optimizer_of(again)
        load_into(row_major, state.values, again, optimizer)
        return losses + channels_last_losses(again, optimizer, 3)

    alone = make()
    optimizer = optimizer_of(alone)
    expected = channels_last_losses(alone, optimizer, 0) + channels_last_losses(alone, optimizer, 3)
    for losses in run_ranks(2, body):
        assert losses == expected


def test_ranks_with_other_memory_formats_are_refused() -> None:
    def body(comm: ThreadCommunicator) -> None:
        Ddp(channels_last_convolution() if comm.rank else nn.Conv2d(3, 4, 3), comm)

    first, second = run_ranks(2, body)
    assert isinstance(first, UsageError)
    assert isinstance(second, UsageError)
    assert "with strides (27, 1, 9, 3) here" in str(second)
