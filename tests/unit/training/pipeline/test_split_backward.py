"""The two parts of a backward add up to the whole one, and each computes its own part only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fireflyer.training.pipeline.split_backward import backward_for_inputs, backward_whole

Run = Callable[[nn.ParameterDict, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]


def chain(p: nn.ParameterDict, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (torch.tanh(x @ p["a"]) @ p["b"] + y,)


def tied(p: nn.ParameterDict, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One parameter is used three times, one of them between the others."""
    return (torch.tanh(torch.tanh(x @ p["a"]) @ p["b"] @ p["a"]) @ p["a"] * y,)


def tied_through_a_product(p: nn.ParameterDict, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    both = p["a"] @ p["b"]
    return (torch.tanh(x @ both) @ p["c"] @ both, y @ p["b"])


def two_outputs(p: nn.ParameterDict, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h = torch.tanh(x @ p["a"])
    return h @ p["b"], (h * y) @ p["c"]


def one_that_no_input_leads_to(p: nn.ParameterDict, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x @ p["a"] + y, p["b"] @ p["c"]


def an_input_that_passes_through(p: nn.ParameterDict, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x, y @ p["a"]


def an_unused_input(p: nn.ParameterDict, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x @ p["a"],)


def checkpointed(p: nn.ParameterDict, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (checkpoint(lambda v: torch.tanh(v @ p["a"]) @ p["b"], x, use_reentrant=False) + y,)


ALL = [
    chain,
    tied,
    tied_through_a_product,
    two_outputs,
    one_that_no_input_leads_to,
    an_input_that_passes_through,
    an_unused_input,
    pytest.param(checkpointed, marks=pytest.mark.slow),  # torch imports its compiler for it
]


def prepared(run: Run) -> tuple[nn.ParameterDict, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(7)

    def values() -> torch.Tensor:
        return torch.randn(4, 4, dtype=torch.float64, generator=generator)

    parameters = nn.ParameterDict({name: nn.Parameter(values()) for name in "abc"})
    inputs = (values().requires_grad_(), values().requires_grad_())
    return parameters, inputs, run(parameters, *inputs)


def gradients(outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.linspace(-1, 2, 16, dtype=torch.float64).view(4, 4) * (k + 1) for k in range(len(outputs)))


@pytest.mark.parametrize("run", ALL, ids=lambda run: run.__name__)
def test_the_parts_add_up_to_the_whole(run: Run) -> None:
    whole, inputs, outputs = prepared(run)
    expected = backward_whole(outputs, gradients(outputs), inputs)
    split, inputs, outputs = prepared(run)
    found, deferred = backward_for_inputs(outputs, gradients(outputs), inputs)
    assert all(parameter.grad is None for parameter in split.values())
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
    deferred.run()
    for name, parameter in split.items():
        other = whole[name].grad
        assert (parameter.grad is None) == (other is None), name
        if other is not None:
            torch.testing.assert_close(parameter.grad, other, rtol=1e-13, atol=1e-13)


def test_weights_follow_later_and_hooks_of_parameters_see_them() -> None:
    parameters, inputs, outputs = prepared(chain)
    seen: list[str] = []
    for name, parameter in parameters.items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    _, deferred = backward_for_inputs(outputs, gradients(outputs), inputs)
    assert seen == []
    deferred.run()
    assert sorted(seen) == ["a", "b"]


def count(counts: Counter[str], name: str, *_: object) -> None:
    counts[name] += 1


def test_the_parts_are_run_once_each() -> None:
    """Each node on the way runs once in the part for the inputs; only branching ones run again."""
    counts: Counter[str] = Counter()
    _, inputs, outputs = prepared(chain)
    node = outputs[0].grad_fn
    stack, nodes = [node], set()
    while stack:
        one = stack.pop()
        if one is not None and one not in nodes:
            nodes.add(one)
            stack += [child for child, _ in one.next_functions]
    for one in nodes:
        one.register_hook(partial(count, counts, type(one).__name__))
    _, deferred = backward_for_inputs(outputs, gradients(outputs), inputs)
    assert counts["TanhBackward0"] == 1
    deferred.run()
    assert counts["TanhBackward0"] == 1
    assert counts["MmBackward0"] == 4
