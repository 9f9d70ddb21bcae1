"""DistributedDataParallel where ranks differ, peers fail, a pass is broken off, or a module cannot be trained."""

from typing import Any

import pytest
import torch
from tests.support.collectives.ddp_threads import (
    Gradients,
    TwoHeads,
    assert_close,
    batch,
    errors,
    gradients,
    meta_buffer,
    network,
    run,
    seeded,
    share,
    single_process,
)
from tests.support.collectives.thread_world import ThreadCommunicator
from torch import nn

from fireflyer.base.errors import PeerFailed, UsageError
from fireflyer.training import DistributedDataParallel as Ddp


def test_a_parameter_without_gradient_is_an_error_on_all_ranks() -> None:
    def body(comm: ThreadCommunicator) -> None:
        model = Ddp(TwoHeads(), comm, bucket_bytes=1)
        model(share(batch(), comm), "left right" if comm.rank == 0 else "left").backward()

    other, own = errors(2, body)
    assert other.startswith("UsageError: another rank computed no gradient")
    assert own.startswith(
        "UsageError: 2 parameters received no gradient: right.bias, right.weight; use them in the loss"
    )


def test_training_goes_on_after_that_error() -> None:
    def body(comm: ThreadCommunicator) -> Gradients:
        model = Ddp(seeded(TwoHeads), comm)
        with pytest.raises(UsageError, match="received no gradient"):
            model(share(batch(), comm), "left").backward()
        model.zero_grad()
        model(share(batch(), comm), "left right").backward()
        return gradients(model.module)

    expected = seeded(TwoHeads)
    expected(batch(), "left right").backward()
    assert_close(run(2, body)[0], gradients(expected))


def test_what_is_no_module_is_refused() -> None:
    def body(comm: ThreadCommunicator) -> None:
        function: Any = torch.relu
        Ddp(function, comm)

    assert errors(1, body) == [
        "UsageError: cannot wrap a builtin_function_or_method; the first argument is a torch.nn.Module"
    ]


def test_another_module_on_a_rank_is_refused_by_all() -> None:
    def body(comm: ThreadCommunicator) -> None:
        Ddp(nn.Linear(6, 3 if comm.rank == 2 else 2), comm)

    zero, one, two = errors(3, body)
    assert zero == one == "UsageError: the modules of ranks [2] differ from rank 0's; the errors of those ranks say how"
    assert two == (
        "UsageError: rank 2 wraps a different module than rank 0: item 0 is parameter 'weight' (3, 6) float32 trained "
        "here, parameter 'weight' (2, 6) float32 trained there"
    )


def test_other_options_on_a_rank_are_refused_by_all() -> None:
    def body(comm: ThreadCommunicator) -> None:
        Ddp(nn.Linear(6, 2), comm, bucket_bytes=100 + comm.rank)

    assert "bucket_bytes=101" in errors(2, body)[1]


def test_a_failed_peer_leaves_backward_with_its_own_class() -> None:
    construction = 3  # two to compare modules, one for the parameters

    def body(comm: ThreadCommunicator) -> None:
        model = Ddp(network(), comm, bucket_bytes=1)
        assert len(comm.started) == construction
        for _ in range(2):
            with pytest.raises(PeerFailed) as caught:
                model(share(batch(), comm)).square().mean().backward()
            assert caught.value.rank == 1

    run(2, body, fail_at=construction + 2)


def test_an_error_when_starting_an_allreduce_leaves_backward_as_it_is() -> None:
    def body(comm: ThreadCommunicator) -> None:
        model = Ddp(network(), comm, bucket_bytes=1)

        def refuse(kind: str) -> None:
            if len(comm.started) == 6:  # the fourth allreduce, after the three operations of the construction
                raise PeerFailed("rank 7 is gone", rank=7)

        comm.on_start = refuse
        with pytest.raises(PeerFailed, match="rank 7 is gone"):
            model(batch()).square().mean().backward()
        comm.on_start = lambda kind: None
        model.zero_grad()
        model(batch()).square().mean().backward()

    run(1, body)


def test_a_pass_broken_off_by_the_user_is_told_at_the_next_one() -> None:
    def body(comm: ThreadCommunicator) -> None:
        model = Ddp(network(), comm, bucket_bytes=1)
        layer = model.module.get_submodule("0").weight
        assert isinstance(layer, nn.Parameter)

        def fail(grad: torch.Tensor) -> None:
            raise KeyError("user")

        handle = layer.register_hook(fail)  # type: ignore[no-untyped-call]
        with pytest.raises(KeyError):
            model(batch()).square().mean().backward()
        handle.remove()
        for _ in range(2):
            with pytest.raises(UsageError, match="failed after 5 of 6 allreduces"):
                model(batch())

    run(1, body)


def test_a_pass_broken_off_before_the_first_allreduce_leaves_no_trace() -> None:
    def body(comm: ThreadCommunicator) -> Gradients:
        model = Ddp(network(), comm)
        layer = model.module.get_submodule("0").weight
        assert isinstance(layer, nn.Parameter)

        def fail(grad: torch.Tensor) -> None:
            raise KeyError("user")

        handle = layer.register_hook(fail)  # type: ignore[no-untyped-call]
        with pytest.raises(KeyError):
            model(share(batch(), comm)).square().mean().backward()
        handle.remove()
        model.zero_grad()
        model(share(batch(), comm)).square().mean().backward()
        return gradients(model.module)

    assert_close(run(2, body)[0], single_process(network(), batch()))


def test_changed_parameters_are_refused() -> None:
    def body(comm: ThreadCommunicator) -> None:
        model = Ddp(network(), comm)
        model.module.get_submodule("2").requires_grad_(False)
        model(batch())

    assert errors(1, body) == [
        "UsageError: parameters were replaced, cast, moved, frozen or unfrozen after wrapping: ['2.bias', '2.weight']; "
        "wrap again"
    ]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Linear(2, 2).requires_grad_(False), "no parameter that requires a gradient"),
        (nn.ParameterList([torch.zeros(2).to(torch.float8_e5m2)]), "is torch.float8_e5m2"),
        (nn.Linear(2, 2, device="meta"), "'weight' is on meta"),
        (meta_buffer(), "'mask' is on meta"),
        (nn.LazyLinear(2), "'weight' has no shape yet; run a forward pass of the module before wrapping"),
    ],
)
def test_modules_that_cannot_be_trained_are_refused(module: nn.Module, message: str) -> None:
    def body(comm: ThreadCommunicator) -> None:
        Ddp(module, comm)

    assert message in errors(1, body)[0]


def test_sparse_gradients_are_refused() -> None:
    def body(comm: ThreadCommunicator) -> None:
        model = Ddp(nn.Embedding(5, 2, sparse=True), comm)
        model(torch.tensor([1])).sum().backward()

    assert "sparse gradient" in errors(1, body)[0]


def test_bucket_bytes_must_be_positive() -> None:
    assert "bucket_bytes 0 must be positive" in errors(1, lambda comm: Ddp(network(), comm, bucket_bytes=0))[0]
