"""The arguments of torch's DistributedDataParallel that ours refuses and what it says; hooks and graphs that are wrong.

That those which count have torch's effect is in tests/conformance/test_torch_ddp.py."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.collectives.ddp_threads import Gradients, TwoHeads, batch, errors, gradients, network, run, share
from tests.support.collectives.thread_world import ThreadCommunicator
from torch import nn

from fireflyer.base.errors import UsageError
from fireflyer.collectives.compression import Compression
from fireflyer.training import DistributedDataParallel as Ddp


def message(**arguments: Any) -> str:
    (found,) = errors(1, lambda comm: Ddp(network(), comm=comm, **arguments))
    return found


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"mixed_precision": object()}, "mixed_precision is not supported: use torch.autocast"),
        ({"delay_all_reduce_named_params": []}, "delay_all_reduce_named_params is not supported"),
        ({"param_to_hook_all_reduce": object()}, "param_to_hook_all_reduce is not supported"),
        ({"bucket_cap_mb_list": [1]}, "bucket_cap_mb_list is not supported: all buckets have one size here; pass buck"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb 0 must be positive; 25 is usual"),
        ({"bucket_cap_mb": 1, "bucket_bytes": 1}, "bucket_cap_mb and bucket_bytes say the same; pass one of them"),
        (
            {"device_ids": [0]},
            "device_ids and output_device are for a module on one GPU, but its parameters are on cpu",
        ),
        ({"output_device": 0}, "device_ids and output_device are for a module on one GPU"),
        ({"device_ids": object()}, "device_ids is a object; it is a list of one device"),
        ({"process_group": object()}, "comm and process_group both name the ranks; pass one of them"),
    ],
)
def test_an_argument_that_makes_no_sense_here_is_refused_with_what_to_do(
    arguments: dict[str, Any], expected: str
) -> None:
    assert message(**arguments).startswith(f"UsageError: {expected}")


def test_without_a_process_group_the_message_says_what_to_call() -> None:
    with pytest.raises(UsageError, match=r"call torch\.distributed\.init_process_group first, or pass comm="):
        Ddp(network())


def test_join_needs_a_process_group() -> None:
    def body(comm: ThreadCommunicator) -> None:
        Ddp(network(), comm).join()

    assert errors(1, body) == [
        "UsageError: join() needs a process group: wrap with process_group= in place of a communicator"
    ]


def test_a_model_with_a_communicator_of_its_own_is_not_copied() -> None:
    def body(comm: ThreadCommunicator) -> None:
        copy.deepcopy(Ddp(network(), comm))

    assert "copy or pickle model.module, and wrap that" in errors(1, body)[0]


# --- parameters in shared memory ---


def test_parameters_in_shared_memory_keep_their_values_formats_and_identity() -> None:
    def body(comm: ThreadCommunicator) -> None:
        module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(6, 2)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        before = {name: (id(p), p.stride(), p.detach().clone()) for name, p in module.named_parameters()}
        model = Ddp(module, comm, parameters_in_shared_memory=True)
        for name, parameter in model.module.named_parameters():
            identity, stride, value = before[name]
            assert (id(parameter), parameter.stride()) == (identity, stride)
            assert torch.equal(parameter, value)
            assert parameter.data_ptr() % 32 == model.module.get_parameter("0.weight").data_ptr() % 32

    run(1, body)


def test_a_parameter_whose_memory_was_replaced_is_told_at_the_next_forward_pass() -> None:
    def body(comm: ThreadCommunicator) -> None:
        model = Ddp(network(), comm, parameters_in_shared_memory=True)
        model.load_state_dict({f"module.{name}": value for name, value in network(seed=4).state_dict().items()})
        model.cpu()
        model(batch()).sum().backward()
        weight = model.module.get_parameter("2.weight")
        weight.data = weight.data.clone()
        model(batch())

    assert errors(1, body) == [
        "UsageError: the memory of parameters was replaced after wrapping: ['2.weight']; change values in place, as "
        "optimizers and load_state_dict do, or wrap again"
    ]


# --- hooks ---


def done(value: object) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


def test_a_hook_sees_each_bucket_in_order_and_its_tensor_becomes_the_gradients() -> None:
    def body(comm: ThreadCommunicator) -> tuple[list[Any], Gradients]:
        model = Ddp(network(), comm, bucket_bytes=700)
        seen: list[Any] = []

        def hook(state: list[Any], bucket: Any) -> torch.futures.Future[torch.Tensor]:
            assert bucket.buffer().data_ptr() == bucket.gradients()[0].data_ptr()
            assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
            state.append((bucket.index(), bucket.is_last(), len(bucket.parameters())))
            bucket.set_buffer(torch.full_like(bucket.buffer(), 7))
            return done(bucket.buffer())

        model.register_comm_hook(seen, hook)
        model(share(batch(), comm)).sum().backward()
        assert model.stats().allreduces_during_backward == len(model.buckets)
        return seen, gradients(model.module)

    for seen, found in run(2, body):
        assert [index for index, _, _ in seen] == list(range(len(seen)))
        assert [last for _, last, _ in seen] == [False] * (len(seen) - 1) + [True]
        assert sum(count for _, _, count in seen) == 6
        assert all(bool((gradient == 7).all()) for gradient in found.values())


def plain(state: object, bucket: Any) -> Any:
    return done(bucket.buffer())


def annotated(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    return done(bucket.buffer())


def returns_no_future(state: object, bucket: Any) -> Any:
    return bucket.buffer()


def returns_less(state: object, bucket: Any) -> Any:
    return done(bucket.buffer()[1:])


def returns_text(state: object, bucket: Any) -> Any:
    return done("seven")


def sets_less(state: object, bucket: Any) -> Any:
    bucket.set_buffer(bucket.buffer()[1:])


def other_name(state: object, gradients: Any) -> Any: ...


def other_type(state: object, bucket: int) -> Any: ...


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (plain, "returned None"),
        (annotated, "returned None"),
        (7, "the communication hook is a int; pass a function (state, bucket)"),
        (other_name, "its second parameter must be called bucket"),
        (other_type, "annotated as <class 'int'>; it is a dist.GradBucket"),
        (returns_no_future, "hook returns_no_future returned a Tensor; it must return a torch.futures.Future"),
        (returns_less, "holds 434 elements; it must hold one tensor of 435 elements"),
        (returns_text, "holds a str; it must hold one tensor of 435 elements"),
        (sets_less, "set_buffer got 434 elements; the bucket has 435"),
    ],
)
def test_a_hook_that_cannot_work_is_told_what_is_wrong(hook: Any, expected: str) -> None:
    def body(comm: ThreadCommunicator) -> None:
        model = Ddp(network(), comm)
        model.register_comm_hook(None, hook)
        model(batch()).sum().backward()

    assert expected in errors(1, body)[0]


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (lambda model: model.register_comm_hook(None, plain), "plain is registered already; a model has one"),
        (lambda model: model(batch()).sum().backward(), "gradients were averaged already; register the communication"),
    ],
)
def test_a_hook_is_registered_once_and_before_the_first_pass(prepare: Callable[[Ddp], object], expected: str) -> None:
    def body(comm: ThreadCommunicator) -> None:
        model = Ddp(network(), comm)
        prepare(model)
        model.register_comm_hook(None, plain)

    assert expected in errors(1, body)[0]


@pytest.mark.parametrize("when", ["at once", "in its future"])
def test_a_hook_that_fails_on_one_rank_ends_the_waiting_of_the_others_with_its_rank_and_its_error(when: str) -> None:
    def hook(comm: ThreadCommunicator, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        if comm.rank == 1 and when == "at once":
            raise ValueError("bad batch shape\n(3, 4)")
        future.set_result(bucket.buffer())
        if comm.rank == 1:
            return future.then(lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
        comm.allreduce(bucket.buffer(), async_op=True).wait()
        return future

    def body(comm: ThreadCommunicator) -> None:
        model = Ddp(network(), comm)
        model.register_comm_hook(comm, hook)
        model(batch()).sum().backward()

    first, second = errors(2, body)
    assert first.startswith("Aborted: rank 1 aborted the group: the communication hook ")
    assert "hook of rank 1 raised " in first
    what = ("ValueError: bad batch shape", " (3, 4)") if when == "at once" else ("division by zero",)
    assert "".join(what) in first
    assert what[0] in second


def test_a_hook_and_compression_exclude_each_other() -> None:
    def body(comm: ThreadCommunicator) -> None:
        Ddp(network(), comm, compression=Compression("bf16")).register_comm_hook(None, plain)

    assert "pass compression=None to register one" in errors(1, body)[0]


# --- graphs ---


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        ("left", "2 parameters received fewer gradients than in the first pass: right.bias, right.weight"),
        ("left right left", "received more gradients than in the first pass; the graph is not static"),
    ],
)
def test_a_static_graph_that_changes_is_an_error(heads: str, expected: str) -> None:
    class Repeats(TwoHeads):
        def forward(self, x: torch.Tensor, heads: str) -> Any:
            x = self.body(x).tanh()
            used = [torch.utils.checkpoint.checkpoint(getattr(self, h), x, use_reentrant=True) for h in heads.split()]
            return sum(each.square().mean() for each in used)

    def body(comm: ThreadCommunicator) -> None:
        model = Ddp(Repeats(), comm, static_graph=True)
        model(batch(), "left right").backward()
        model(batch(), heads).backward()

    assert expected in errors(1, body)[0]


def test_a_static_graph_starts_no_sum_early_in_its_first_pass_and_all_of_them_later() -> None:
    def body(comm: ThreadCommunicator) -> list[int]:
        model = Ddp(TwoHeads(), comm, bucket_bytes=1, static_graph=True)
        early = []
        for _ in range(2):
            before = model.stats().allreduces_during_backward
            model(share(batch(), comm), "left").backward()
            early.append(model.stats().allreduces_during_backward - before)
        assert model.module.get_submodule("right").weight.grad is None
        return early

    assert run(2, body) == [[0, 6], [0, 6]]


def test_a_graph_of_the_backward_pass_warns_that_it_is_not_averaged() -> None:
    def body(comm: ThreadCommunicator) -> None:
        model = Ddp(nn.Linear(6, 2), comm)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(batch()).square().sum().backward(create_graph=True)
        ours = [str(each.message) for each in caught if "their own gradients" in str(each.message)]
        assert ours == [
            "backward(create_graph=True): gradients are averaged, but their own gradients are not; use "
            "torch.autograd.grad for what is differentiated twice"
        ]
        assert all(p.grad is not None and not p.grad.requires_grad for p in model.parameters())

    run(1, body)


def test_complex_gradients_are_summed_as_pairs_of_floats() -> None:
    def body(comm: ThreadCommunicator) -> tuple[Any, list[str]]:
        model = Ddp(nn.Linear(2, 1, bias=False, dtype=torch.complex64), comm)
        before = len(comm.started)
        x = torch.tensor([[1 + 2j, 3j * comm.rank]], dtype=torch.complex64)
        model(x).real.sum().backward()
        (weight,) = model.parameters()
        assert weight.grad is not None
        return weight.grad.flatten().tolist(), comm.started[before:]

    assert run(2, body) == [([1 - 2j, -1.5j], ["allreduce float32 6"])] * 2
