"""What the methods that torch calls have in common: the profiler shows them, and Dynamo does not trace them.

C++ calls such methods while `torch.compile` watches the thread for new Python frames. It would compile them as if they
were the user's; so they are skipped, with all that they call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch._C import _autograd

__all__ = ["not_traced", "shown_by_profiler"]

_Class = TypeVar("_Class", bound=type)


def shown_by_profiler(prefix: str, titles: Mapping[str, str]) -> Callable[[_Class], _Class]:
    """Methods, by name, and what `torch.profiler` shows for their calls: `prefix:title`, with the shapes of the tensors
    that were passed, in the thread that calls. The range ends when the call returns; a call that is not asynchronous
    returns when the operation has ended."""

    def decorate(cls: _Class) -> _Class:
        for name, title in titles.items():
            setattr(cls, name, _shown(f"{prefix}:{title}", getattr(cls, name)))
        return cls

    return decorate


def _shown(title: str, method: Callable[..., Any]) -> Callable[..., Any]:
    profiling = _autograd._profiler_enabled  # noqa: SLF001 - what torch itself asks
    enter, leave = _autograd._record_function_with_args_enter, _autograd._record_function_with_args_exit  # noqa: SLF001

    @wraps(method)
    def show(*arguments: Any, **options: Any) -> Any:
        if not profiling():
            return method(*arguments, **options)
        handle = enter(title, *_tensors(arguments[1:]))
        try:
            return method(*arguments, **options)
        finally:
            leave(handle)

    return show


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list):
            found += _tensors(value)
    return found


def not_traced(cls: _Class) -> _Class:
    """Dynamo runs the methods of this class as they are, called from wherever."""
    dynamo = torch._C._dynamo.eval_frame  # noqa: SLF001 - `torch.compiler.disable` would import Dynamo, which takes seconds
    skip = dynamo._FrameAction.SKIP  # noqa: SLF001
    for value in vars(cls).values():
        if isinstance(value, FunctionType):
            dynamo.set_code_exec_strategy(value.__code__, dynamo._FrameExecStrategy(skip, skip))  # noqa: SLF001
    return cls
