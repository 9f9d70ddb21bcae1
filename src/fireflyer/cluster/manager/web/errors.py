"""Errors as answers: a status, and one line of JSON (`ErrorView`)."""

from __future__ import annotations

import logging
from typing import Any, Final

from litestar import MediaType, Request, Response
from litestar.exceptions import HTTPException
from litestar.status_codes import HTTP_500_INTERNAL_SERVER_ERROR

from fireflyer.base.errors import (
    Busy,
    DataCorruption,
    Exists,
    Fenced,
    FireflyerError,
    InvariantViolation,
    NoSpace,
    NotFound,
    PermissionDenied,
    TransientError,
    UsageError,
)
from fireflyer.base.units import SECOND
from fireflyer.cluster.manager.platform import Elsewhere
from fireflyer.cluster.schema.api import LEADER_HEADER, ErrorView

__all__ = ["HANDLERS", "TooOften", "Unauthenticated", "answer"]

_log = logging.getLogger(__name__)
_STATUSES: Final[tuple[tuple[type[FireflyerError], int], ...]] = (
    (UsageError, 400),
    (NotFound, 404),
    (Exists, 409),
    (PermissionDenied, 403),
    (NoSpace, 507),
    (Fenced, 503),
    (Busy, 503),
    (TransientError, 503),
)


class Unauthenticated(PermissionDenied):
    """Nobody has proven who asks."""


class TooOften(Busy):
    """This user, or this address, asks more often than it may."""


def answer(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Response[ErrorView]:
    return Response(ErrorView(code, message), status_code=status, media_type=MediaType.JSON, headers=headers or {})


def _of_ours(_request: Request[Any, Any, Any], error: FireflyerError) -> Response[ErrorView]:
    message = " ".join(str(error).split())[:1000]
    if isinstance(error, Unauthenticated):
        return answer(401, "unauthenticated", message, {"WWW-Authenticate": "Bearer"})
    if isinstance(error, TooOften):
        return answer(429, "too_often", message, {"Retry-After": str(max(1, (error.retry_ns or 0) // SECOND))})
    if isinstance(error, Elsewhere):
        return answer(503, error.code, message, {"Retry-After": "1", LEADER_HEADER: error.address})
    for kind, status in _STATUSES:
        if isinstance(error, kind):
            return answer(status, kind.code, message, {"Retry-After": "1"} if status == 503 else None)
    if isinstance(error, DataCorruption | InvariantViolation):
        _log.error("a request failed kind=%s reason=%s", type(error).__name__, error)
        return answer(HTTP_500_INTERNAL_SERVER_ERROR, error.code, "the manager has a fault; its log says which")
    return answer(503, error.code, message)


def _of_http(_request: Request[Any, Any, Any], error: HTTPException) -> Response[ErrorView]:
    extra = error.extra if isinstance(error.extra, list) else []
    details = "; ".join(f"{one.get('key', '')}: {one.get('message', '')}" for one in extra[:5] if isinstance(one, dict))
    code = {400: "usage", 401: "unauthenticated", 403: "permission", 404: "not_found", 405: "method", 413: "too_large"}
    message = " ".join((details or error.detail).split())[:1000]
    return answer(error.status_code, code.get(error.status_code, "http"), message, dict(error.headers or {}))


def _unexpected(_request: Request[Any, Any, Any], error: Exception) -> Response[ErrorView]:
    _log.error("a request failed with an unexpected error", exc_info=error)
    return answer(HTTP_500_INTERNAL_SERVER_ERROR, "internal", "the manager has a fault; its log says which")


HANDLERS: Final[dict[Any, Any]] = {FireflyerError: _of_ours, HTTPException: _of_http, Exception: _unexpected}
