"""Coroutines as tests."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from tests.support.patience import allowed_s

from fireflyer.runtime.driver import run

__all__ = ["on_loop"]


def on_loop(test: Callable[..., Coroutine[Any, Any, None]], *, limit_s: float = 60) -> Callable[..., None]:
    """Runs the test on a fresh loop, for at most `limit_s`, and lets no task of it survive."""

    async def guarded(*args: Any, **kwargs: Any) -> None:
        async with asyncio.timeout(allowed_s(limit_s)):
            await test(*args, **kwargs)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks left behind: {left}"

    @functools.wraps(test)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        run(guarded(*args, **kwargs))

    wrapper.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    return wrapper
