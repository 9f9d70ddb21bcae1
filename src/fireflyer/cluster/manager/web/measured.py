"""Counts requests and how long they took, by route: what an address bar or a scanner sends makes no new series."""

from __future__ import annotations

import time
from collections import Counter
from typing import Final

from litestar import Litestar
from litestar.enums import ScopeType
from litestar.types import Message, Receive, Scope, Send

from fireflyer.base.histogram import Histogram

__all__ = ["MeasuredApp", "RequestFigures"]

BOUNDS_S: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 20)
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_OTHER: Final = "other"


class RequestFigures:
    def __init__(self) -> None:
        self.answered: Counter[tuple[str, str, int]] = Counter()
        """By method, template of the route, and status."""
        self.times_s: dict[str, Histogram] = {}
        """By template, until the answer began: streams may last for hours."""

    def add(self, method: str, route: str, status: int, time_s: float) -> None:
        self.answered[method if method in _METHODS else _OTHER, route, status] += 1
        self.times_s.setdefault(route, Histogram(BOUNDS_S)).observe(time_s)


class MeasuredApp:
    """The application, measured from outside: what it answers before it finds a route counts, too."""

    def __init__(self, app: Litestar, figures: RequestFigures) -> None:
        self._app = app
        self._figures = figures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        method, began_s = scope["method"], time.monotonic()

        async def measured(message: Message) -> None:
            if message["type"] == "http.response.start":
                # The application has put it there when it found the route.
                route = str(scope.get("path_template") or _OTHER)
                self._figures.add(method, route, message["status"], time.monotonic() - began_s)
            await send(message)

        await self._app(scope, receive, measured)
