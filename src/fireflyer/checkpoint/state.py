"""What a training job is made of, flattened into named tensors and plain values, and put back bit for bit.

    State.shared     `model/<name>`, `optimizer/<parameter number>/<name>`: equal on every rank
    State.own        `rng/torch`, `rng/python`, `rng/numpy`, …: different on each rank
    State.values     `{"optimizer": {"kind": …, "order": […], "groups": […], "scalars": {…}}, "user": {…}}`: JSON,
                     equal on every rank

With `by_name` state of the optimizer is `optimizer/<parameter name>/<name>`, the same in every arrangement of a model
over ranks: the ranks of a pipeline have other parts of it, and number their parameters alike.

No pickle anywhere. Optimizer state goes in and out without a cast (`Optimizer.load_state_dict` would round float32
moments of a bfloat16 parameter to bfloat16).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from fireflyer.base.errors import UsageError
from fireflyer.checkpoint.core.plain import decode_state, encode_state
from fireflyer.checkpoint.sharding import address_of, local_part, sharded_like

__all__ = [
    "State",
    "capture",
    "capture_rng",
    "changed_by",
    "layouts_of",
    "load_into",
    "load_rng",
    "needed_by",
    "tensors_of",
]


@dataclass(frozen=True)
class State:
    """State that `CheckpointManager.save` stores. Tensors are referred to, not copied: `save` copies them."""

    shared: Mapping[str, torch.Tensor]
    """Equal on every rank that has one of the name; ranks need not have the same names (stages of a pipeline)."""
    own: Mapping[str, torch.Tensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    of_rank_0: frozenset[str] = frozenset()
    """Names in `shared` in which ranks may differ at the moment (buffers such as the statistics of a batch norm): rank
    0's are stored, or the lowest rank's that has one. All others are stored by whichever rank has room for them."""


def capture(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    values: Mapping[str, Any] | None = None,
    rng: bool = True,
    by_name: bool = False,
) -> State:
    """The state of a job on this rank. `values` are the caller's own (sampler position, …); `load_into` returns them,
    with floats that are not finite and keys that are numbers, but tuples as lists. Raises `UsageError`.

    `by_name` (default: by number) names state of the optimizer by its parameter: for jobs in which ranks have different
    parts of the model, which must call each parameter by its name in the whole model, and for what such a job is to
    continue. The optimizer must keep nothing but tensors for a parameter, as Adam does.

    Of what is no parameter of `model` rank 0's values are stored, as data parallelism goes on from rank 0's buffers."""
    shared: dict[str, torch.Tensor] = {}
    buffers: list[str] = []
    described = model.state_dict()
    parameters = _parameters(model, described)
    for name, value in described.items():
        if not isinstance(value, torch.Tensor):
            raise UsageError(f"model state {name!r} is {type(value).__name__}, only tensors can be stored")
        shared[f"model/{name}"] = value
        if name not in parameters:
            buffers.append(f"model/{name}")
    plain: dict[str, Any] = {"user": encode_state(dict(values or {}), "values")}
    if optimizer is not None:
        capture_state = _capture_by_name if by_name else _capture_optimizer
        plain["optimizer"] = capture_state(optimizer, shared, _names(model, described))
    return State(shared, capture_rng() if rng else {}, plain, frozenset(buffers))


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of `model` by the names under which `capture` stores them: where `CheckpointManager.restore` may put
    what it reads."""
    described = model.state_dict()
    return {f"model/{name}": value for name, value in described.items() if isinstance(value, torch.Tensor)}


def changed_by(optimizer: torch.optim.Optimizer, state: State) -> frozenset[str]:
    """The names in `state.shared`, as `capture` made it, of what only a step of this optimizer changes: its parameters
    and its state. A model may change others (buffers) in a forward pass, and another optimizer those it has."""
    parameters = {address_of(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return frozenset(
        name
        for name, tensor in state.shared.items()
        if name.startswith("optimizer/") or address_of(tensor) in parameters
    )


def needed_by(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Callable[[str], bool]:
    """Says of a name under which `capture(by_name=True)` stores a tensor whether this model and optimizer have it: for
    `CheckpointManager.restore(wanted=…)`. Raises `UsageError` for parameters of the optimizer that have no name."""
    needed = dict.fromkeys(tensors_of(model))
    prefixes = {f"optimizer/{name}": None for name in _numbers(optimizer, _names(model, model.state_dict()))}
    return lambda name: name in needed or name.rpartition("/")[0] in prefixes


def layouts_of(
    optimizer: torch.optim.Optimizer | None, *, by_name_in: torch.nn.Module | None = None
) -> dict[str, DTensor]:
    """Return how the state of each sharded parameter is sharded: as the parameter. By the prefix of the names under
    which `capture` stores it, for `CheckpointManager.restore(like=…)`, as the optimizer of a new process has no state
    yet. `by_name_in`: the model, where `capture` was called with `by_name`."""
    if optimizer is None:
        return {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names: Iterable[object] = range(len(parameters))
    if by_name_in is not None:
        names = _numbers(optimizer, _names(by_name_in, by_name_in.state_dict()))
    return {
        f"optimizer/{name}": parameter
        for name, parameter in zip(names, parameters, strict=True)
        if isinstance(parameter, DTensor)
    }


def _names(model: torch.nn.Module, described: Mapping[str, Any]) -> dict[int, str]:
    """What the state dict calls a parameter: by `_key`, as a rank may have nothing of a sharded one, and so no
    address."""
    names: dict[int, str] = {}
    for name, value in described.items():
        if isinstance(value, torch.Tensor) and address_of(value):
            names.setdefault(address_of(value), name)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not address_of(parameter) and name in described:
            names[id(parameter)] = name
    return names


def _key(parameter: torch.Tensor) -> int:
    return address_of(parameter) or id(parameter)


def _parameters(model: torch.nn.Module, described: Mapping[str, Any]) -> dict[str, None]:
    """The names in the state dict that are parameters, and no buffers."""
    addresses = {address_of(parameter): None for parameter in model.parameters()}
    named = dict(model.named_parameters(remove_duplicate=False))
    return {
        name: None
        for name, value in described.items()
        if name in named or (isinstance(value, torch.Tensor) and address_of(value) in addresses)
    }


def _kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Class whose state it has: of one that takes the place of torch's (`StepInBackward`) that of torch."""
    return str(getattr(optimizer, "state_of", type(optimizer).__name__))


def _order(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str | None]]:
    """The parameters of each group by name; None for what is not in the model."""
    return [[names.get(_key(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]


def _capture_optimizer(
    optimizer: torch.optim.Optimizer, shared: dict[str, torch.Tensor], names: Mapping[int, str]
) -> dict[str, Any]:
    described = optimizer.state_dict()
    scalars: dict[str, dict[str, Any]] = {}
    for number, entries in described["state"].items():
        for name, value in entries.items():
            if isinstance(value, torch.Tensor):
                shared[f"optimizer/{number}/{name}"] = value
            else:
                scalars.setdefault(str(number), {})[name] = value
    kind, order = _kind_of(optimizer), _order(optimizer, names)
    return {"kind": kind, "order": order, "groups": described["param_groups"], "scalars": scalars}


def _numbers(optimizer: torch.optim.Optimizer | None, names: Mapping[int, str]) -> dict[str, int]:
    """Of each parameter's name, its number in the optimizer; in the order of the numbers."""
    numbers: dict[str, int] = {}
    for name in [] if optimizer is None else itertools.chain.from_iterable(_order(optimizer, names)):
        if name is None:
            raise UsageError(
                f"parameter {len(numbers)} of the optimizer is not in the model, so it has no name; give the model "
                "that has it, or capture without by_name"
            )
        numbers[name] = len(numbers)
    return numbers


def _capture_by_name(
    optimizer: torch.optim.Optimizer, shared: dict[str, torch.Tensor], names: Mapping[int, str]
) -> dict[str, Any]:
    described = optimizer.state_dict()
    for name, number in _numbers(optimizer, names).items():
        for key, value in described["state"].get(number, {}).items():
            if not isinstance(value, torch.Tensor):
                raise UsageError(
                    f"{type(optimizer).__name__} keeps {key!r} of {name!r} as {type(value).__name__}; only tensors can "
                    "be stored by name"
                )
            shared[f"optimizer/{name}/{key}"] = value
    groups = [{key: value for key, value in group.items() if key != "params"} for group in described["param_groups"]]
    return {"kind": _kind_of(optimizer), "by_name": True, "groups": groups}


def load_into(
    shared: Mapping[str, torch.Tensor],
    values: Mapping[str, Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Puts what `capture` took back in place and returns the caller's own values. Raises `UsageError` when the model
    or the optimizer is not the one that was saved."""
    prefix = "model/"
    stored = {name.removeprefix(prefix): tensor for name, tensor in shared.items() if name.startswith(prefix)}
    _load_model(stored, model)
    if optimizer is not None:
        if "optimizer" not in values:
            raise UsageError("the checkpoint holds no optimizer; load it without one")
        plain, names = values["optimizer"], _names(model, model.state_dict())
        if plain.get("by_name"):
            shared, plain = _numbered(shared, plain, optimizer, names)
        _check_optimizer(plain, optimizer, names)
        _load_optimizer(shared, plain, optimizer)
    return dict(decode_state(values.get("user", {})))


def _numbered(
    shared: Mapping[str, torch.Tensor],
    plain: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What `_capture_by_name` took, as `_capture_optimizer` would have taken it of this optimizer."""
    numbers = _numbers(optimizer, names)
    renamed: dict[str, torch.Tensor] = {}
    for stored, tensor in shared.items():
        name, _, key = stored.removeprefix("optimizer/").rpartition("/")
        if not stored.startswith("optimizer/"):
            continue
        if name not in numbers:
            raise UsageError(
                f"the optimizer has no parameter {name!r}; restore with wanted=needed_by(model, optimizer)"
            )
        renamed[f"optimizer/{numbers[name]}/{key}"] = tensor
    groups, first = [dict(group) for group in plain["groups"]], 0
    for saved, group in zip(groups, optimizer.param_groups, strict=False):  # a difference is said later
        saved["params"] = list(range(first, first + len(group["params"])))
        first += len(group["params"])
    for saved in groups[len(optimizer.param_groups) :]:
        saved["params"] = []
    return renamed, {"kind": plain.get("kind"), "groups": groups, "scalars": {}}


def _load_model(stored: Mapping[str, torch.Tensor], model: torch.nn.Module) -> None:
    current = model.state_dict()
    for name in (*current, *stored):
        if name not in stored or name not in current:
            where = "the checkpoint" if name not in stored else "the model"
            raise UsageError(f"{where} has no tensor {name!r}; resume with the model that was saved")
        ours, theirs = current[name], stored[name]
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            raise UsageError(
                f"tensor {name!r} is {theirs.dtype} {tuple(theirs.shape)} in the checkpoint and {ours.dtype} "
                f"{tuple(ours.shape)} in the model; resume with the model that was saved"
            )
    with torch.no_grad():
        for name, tensor in stored.items():
            ours = current[name]
            if address_of(tensor) != address_of(ours):  # else it was read into its place
                local_part(ours).copy_(local_part(_sharded_like(tensor, ours)))


def _check_optimizer(plain: Mapping[str, Any], optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """State is found by the position of a parameter in its group: a swap of two would go unnoticed."""
    kind, saved_kind = _kind_of(optimizer), plain.get("kind")
    if saved_kind not in (None, kind, type(optimizer).__name__):
        raise UsageError(
            f"the checkpoint holds the state of {saved_kind}, not of {kind}; load it with the optimizer that was "
            "saved, or without one"
        )
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if [len(group["params"]) for group in plain["groups"]] != sizes:
        raise UsageError("the optimizer has other parameter groups than the saved one; build it in the same way")
    order = _order(optimizer, names)
    for number, (ours, theirs) in enumerate(zip(order, plain.get("order", order), strict=True)):
        for own, other in zip(ours, theirs, strict=True):
            if own != other:
                raise UsageError(
                    f"group {number} of the optimizer has {own!r} where the saved one had {other!r}; build it in the "
                    "same way"
                )


def _load_optimizer(
    shared: Mapping[str, torch.Tensor], plain: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> None:
    groups = plain["groups"]
    parameters: dict[int, torch.nn.Parameter] = {}
    on_device: dict[int, bool] = {}
    for saved, group in zip(groups, optimizer.param_groups, strict=True):
        parameters.update(zip(saved["params"], group["params"], strict=True))
        steps_on_device = bool(saved.get("capturable") or saved.get("fused"))
        on_device.update(dict.fromkeys(saved["params"], steps_on_device))
        for key, value in saved.items():
            if key != "params":
                group[key] = _like(value, group.get(key))
    state: dict[int, dict[str, Any]] = {number: {} for number in parameters}
    for name, tensor in shared.items():
        if name.startswith("optimizer/"):
            _, number_text, key = name.split("/", 2)
            number = int(number_text)
            # Step counters stay on the CPU, where torch keeps them unless it was told otherwise.
            stays = key == "step" and not on_device[number]
            state[number][key] = tensor if stays else _placed_like(tensor, parameters[number])
    for number_text, entries in plain["scalars"].items():
        state[int(number_text)].update(entries)
    for number, parameter in parameters.items():
        if state[number] or parameter in optimizer.state:
            optimizer.state[parameter] = state[number]


def _placed_like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """On the parameter's device, and in its memory format, as fused optimizers walk through both side by side."""
    if isinstance(parameter, DTensor):
        return _sharded_like(tensor, parameter).to(parameter.device)
    if tensor.shape != parameter.shape or tensor.stride() == parameter.stride():
        return tensor.to(parameter.device)
    return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


def _sharded_like(tensor: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    if isinstance(ours, DTensor) and not isinstance(tensor, DTensor) and tensor.shape == ours.shape:
        return sharded_like(tensor, ours)
    return tensor


def _like(value: Any, current: Any) -> Any:
    """JSON knows no tuples: a list is made one where the optimizer has one."""
    return tuple(value) if isinstance(current, tuple) and isinstance(value, list) else value


def capture_rng() -> dict[str, torch.Tensor]:
    """torch's (CPU, and the current CUDA device's), Python's and NumPy's global generators."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    if version != 3 or kind != "MT19937":
        raise UsageError("a global random generator was replaced by another kind; seed Python's and NumPy's own")
    own = {
        "rng/torch": torch.get_rng_state(),
        "rng/python": torch.tensor(words, dtype=torch.int64),
        "rng/python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "rng/numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64),  # type: ignore[union-attr]
        "rng/numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        own["rng/cuda"] = torch.cuda.get_rng_state()
    return own


def load_rng(own: Mapping[str, torch.Tensor]) -> None:
    """Raises `UsageError` when `own` does not come from `capture_rng`."""
    try:
        words = own["rng/python"].tolist()
        gauss = own["rng/python_gauss"].tolist()
        *keys, position, has_gauss = own["rng/numpy"].tolist()
        random.setstate((3, tuple(words), gauss[0] if gauss else None))
        cached = own["rng/numpy_gauss"].item()
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(own["rng/torch"])
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        raise UsageError(f"the random generators' state cannot be restored: {error}") from error
    if "rng/cuda" in own and torch.cuda.is_available():
        torch.cuda.set_rng_state(own["rng/cuda"])
