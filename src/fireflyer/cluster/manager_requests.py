"""Requests to the managers of a platform: which one is asked, what is asked again, and what it answered."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import itertools
import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Final, NamedTuple, Self, TypeVar
from urllib.parse import urlencode, urlsplit

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import (
    Busy,
    DataCorruption,
    Exists,
    FireflyerError,
    NoSpace,
    NotFound,
    PermanentError,
    PermissionDenied,
    TransientError,
    Unreachable,
    UsageError,
)
from fireflyer.cluster.schema.api import API, KEY_HEADER, LEADER_HEADER, ErrorView
from fireflyer.runtime.address import is_loopback

__all__ = ["MAX_MANAGERS", "Connection", "ManagerAddress", "RequestBody", "Requests", "check_certificate", "tls_of"]

MAX_ANSWER_BYTES: Final = 64 << 20
_NO_TLS: Final = (
    "what listens there speaks no TLS; give the address that `ff manager` prints first, not the one for agents"
)
MAX_EVENT_BYTES: Final = 1 << 20
TIMEOUT_S: Final = 30.0
CONNECT_S: Final = 3.0
"""Then the next of several managers is asked: a machine that is down or cut off says nothing."""
SILENT_S: Final = 5
"""Without a sign of life from the kernel at the other end; a manager that is slow acknowledges."""
FAILOVER_S: Final = 20.0
"""How long managers are asked in turn until one leads; with the default lease the next one leads within 10 s."""
FAILOVER_PAUSE_S: Final = 0.25
MAX_MANAGERS: Final = 32
_FINGERPRINT: Final = re.compile(r"[0-9a-f]{64}")
_NAME_MISMATCHES: Final = (62, 64)
"""X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH."""
_T = TypeVar("_T")
_KINDS: Final[Mapping[str, type[FireflyerError]]] = {
    kind.code: kind for kind in (UsageError, NotFound, Exists, PermissionDenied, NoSpace, Busy, TransientError)
}


class ManagerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Address of a manager, and how it is known: by the SHA-256 of its certificate, or, where that is empty, by who
    signed it. `url` begins with https, or with http on this machine."""

    url: str
    fingerprint: str = ""


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """The managers of a platform, and a user's token. The first manager is `url` and `fingerprint`."""

    url: str
    token: str
    fingerprint: str = ""
    others: Annotated[tuple[ManagerAddress, ...], msgspec.Meta(max_length=MAX_MANAGERS - 1)] = ()
    """Asked where the first one does not answer or does not lead."""

    @property
    def managers(self) -> tuple[ManagerAddress, ...]:
        return ManagerAddress(url=self.url, fingerprint=self.fingerprint), *self.others

    def __repr__(self) -> str:
        return f"Connection({self.url})"


class RequestBody(NamedTuple):
    """Of a request, made while it is sent."""

    size_bytes: int
    pieces: Callable[[], Iterable[bytes]]


def tls_of(manager: ManagerAddress) -> ssl.SSLContext:
    """For a connection to it, over which nothing is sent before `check_certificate`."""
    if not manager.fingerprint:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the fingerprint is compared instead
    return context


def check_certificate(manager: ManagerAddress, der: bytes | None) -> None:
    """Raises `PermissionDenied` where it is not the pinned one."""
    found = hashlib.sha256(der or b"").hexdigest()
    if manager.fingerprint and not hmac.compare_digest(found, _pinned(manager)):
        raise PermissionDenied(
            f"{manager.url} has another certificate ({found[:16]}…) than the one that was pinned; if the platform was "
            "made again, log in again with the new fingerprint"
        )


def _pinned(manager: ManagerAddress) -> str:
    """Raises `UsageError`."""
    pinned = manager.fingerprint.lower().replace(":", "")
    if _FINGERPRINT.fullmatch(pinned) is None:
        raise UsageError(
            f"{manager.fingerprint[:80]!r} is no fingerprint: the SHA-256 of a certificate has 64 hexadecimal digits; "
            f"the manager prints that of {manager.url} when it starts"
        )
    return pinned


class _SecureConnection(http.client.HTTPSConnection):
    """Sends nothing before the certificate is the right one."""

    def __init__(self, host: str, port: int | None, manager: ManagerAddress) -> None:
        super().__init__(host, port, timeout=TIMEOUT_S, context=tls_of(manager))
        self._manager = manager

    def connect(self) -> None:
        super().connect()
        try:
            check_certificate(self._manager, self.sock.getpeercert(binary_form=True))
        except BaseException:
            self.close()
            raise


class Requests:
    """Raises the errors of `base.errors`: what the manager answered, or `Unreachable`. Where the connection names
    several managers, the next one is asked when one cannot be reached or does not lead, for `FAILOVER_S` at most."""

    def __init__(self, connection: Connection, *, if_unreachable: str = "") -> None:
        """`if_unreachable`: what its user can do where no connection is made, for the error."""
        if not connection.token.isascii() or not connection.token.isprintable():
            raise UsageError("the token is not one; get one from an operator")
        self._connection = connection
        self._if_unreachable = f"; {if_unreachable}" if if_unreachable else ""
        self._token = connection.token
        self._managers = connection.managers
        for manager in reversed(self._managers):
            self._open(manager)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, manager: ManagerAddress) -> None:
        """Connects at the next request. Raises `UsageError`."""
        url = manager.url
        parts = urlsplit(url)
        if parts.scheme not in ("https", "http") or not parts.hostname:
            raise UsageError(f"{url!r} is not the address of a platform; write it like https://10.0.0.1:9440")
        if parts.scheme == "http":
            if not is_loopback(parts.hostname):
                raise UsageError(f"{url} would send the token in clear; use https")
            self._http: http.client.HTTPConnection = http.client.HTTPConnection(
                parts.hostname, parts.port, timeout=TIMEOUT_S
            )
        else:
            if manager.fingerprint:
                _pinned(manager)
            self._http = _SecureConnection(parts.hostname, parts.port, manager)
        self._manager, self._url = manager, url

    def _connect(self) -> None:
        """Raises `PermissionDenied`, `HTTPException`, `OSError`."""
        self._http.timeout = TIMEOUT_S if len(self._managers) == 1 else CONNECT_S
        try:
            self._http.connect()
        except ssl.SSLCertVerificationError as error:
            raise PermissionDenied(f"{self._url} is not trusted: {_advice(error)}") from None
        self._http.sock.settimeout(TIMEOUT_S)
        _watch(self._http.sock)

    def _open_next(self) -> None:
        self._http.close()
        self._open(self._managers[(self._managers.index(self._manager) + 1) % len(self._managers)])

    def ask(
        self,
        method: str,
        path: str,
        kind: type[_T],
        body: msgspec.Struct | msgspec.Raw | bytes | RequestBody | None = None,
        *,
        query: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> _T:
        request = _request(
            method, path, body, query or {}, {"Authorization": f"Bearer {self._token}", **(headers or {})}
        )
        status, data = self._failing_over(request, lambda response: (response.status, self._read(response)))
        if status >= http.client.MULTIPLE_CHOICES:
            raise _error(status, data)
        try:
            return decode_json(data, kind)
        except DECODE_ERRORS as error:
            raise DataCorruption(f"{self._url} answered something else than expected: {error}") from None

    def _failing_over(self, request: _Request, use: Callable[[http.client.HTTPResponse], _T]) -> _T:
        """`use` of the first answer of a manager that leads. Each manager is asked at least once; then there is a pause
        before they are asked again. One that is alone is asked again where it names itself as the one to ask, as a
        manager does that was held up for a moment. Raises what the last one answered."""
        until_s = time.monotonic() + FAILOVER_S
        for asked in itertools.count(1):
            late, alone = time.monotonic() >= until_s, len(self._managers) == 1
            try:
                response = self._send(request)
                leader = response.headers.get(LEADER_HEADER)
                if late or leader is None or (alone and leader.rstrip("/") != self._url.rstrip("/")):
                    return use(response)
            except Unreachable as error:
                if late or alone or (isinstance(error, _OutcomeUnknown) and not request.repeatable):
                    raise
            self._open_next()
            if asked % len(self._managers) == 0:
                time.sleep(FAILOVER_PAUSE_S)
        raise AssertionError

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        try:
            data = response.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            self._http.close()
            raise _OutcomeUnknown(f"{self._url} broke the connection: {error}") from None
        except BaseException:  # Ctrl-C, as in `_send`
            self._http.close()
            raise
        if len(data) == MAX_ANSWER_BYTES:
            self._http.close()
            raise DataCorruption(f"{self._url} answered more than {MAX_ANSWER_BYTES} bytes")
        return data

    def _send(self, request: _Request) -> http.client.HTTPResponse:
        """To the manager that is open. Raises `Unreachable`: `_OutcomeUnknown` where it may have got the request."""
        for last in (False, True):
            fresh = self._http.sock is None
            try:
                if fresh:
                    self._connect()
            except PermissionDenied:  # which is an OSError
                self._http.close()
                raise
            except (http.client.HTTPException, OSError) as error:
                self._http.close()
                why = _NO_TLS if getattr(error, "reason", "") == "WRONG_VERSION_NUMBER" else error
                raise Unreachable(f"{self._url} cannot be reached: {why}{self._if_unreachable}") from None
            except BaseException:  # Ctrl-C: over a connection without TLS yet, the next request would go in clear
                self._http.close()
                raise
            try:
                data = request.data.pieces() if isinstance(request.data, RequestBody) else request.data
                self._http.request(request.method, request.target, data, dict(request.headers))
                return self._http.getresponse()
            except FireflyerError:  # of what makes the body: the request was sent in part
                self._http.close()
                raise
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError) as error:
                # A connection that was kept open may have been closed meanwhile: nothing was answered, ask once more.
                self._http.close()
                if fresh or last or not request.repeatable:
                    raise _OutcomeUnknown(f"{self._url} broke the connection: {error}") from None
            except (http.client.HTTPException, OSError) as error:
                self._http.close()
                raise _OutcomeUnknown(f"{self._url} does not answer: {error}") from None
            except BaseException:  # Ctrl-C: this answer is still to come, and is not that of the next request
                self._http.close()
                raise
        raise AssertionError

    def stream_events(self, path: str, kind: Any, heard: str, query: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
        """Server-sent events with their ids, after `heard`; None: a comment."""
        headers = {"Last-Event-ID": heard} if heard else {}
        headers |= {"Authorization": f"Bearer {self._token}", "Accept": "text/event-stream"}
        response = self._failing_over(_request("GET", path, None, query, headers), lambda response: response)
        if response.status != http.client.OK:
            raise _error(response.status, self._read(response))
        try:
            yield from _events(response, kind)
        finally:
            self._http.close()


def _watch(connection: socket.socket) -> None:
    """Ends it when the machine at the other end is silent, also while an answer or an event is awaited."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", SILENT_S),
        ("TCP_KEEPALIVE", SILENT_S),  # what macOS calls it
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 1000 * SILENT_S),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _advice(error: ssl.SSLCertVerificationError) -> str:
    said = error.verify_message.rstrip(".")
    said = said[:1].lower() + said[1:]
    if error.verify_code in _NAME_MISMATCHES:
        return f"{said}; use a name that the certificate has, or pin it: ff login URL --fingerprint SHA256"
    return (
        f"{said}; log in with the fingerprint that the manager prints when it starts: ff login URL --fingerprint "
        "SHA256, or name the file with the certificate of who signed it in SSL_CERT_FILE"
    )


class _OutcomeUnknown(Unreachable):
    """The request may have been carried out."""


class _Request(NamedTuple):
    method: str
    target: str
    data: bytes | RequestBody | None
    headers: Mapping[str, str]

    @property
    def repeatable(self) -> bool:
        """Twice is the same as once."""
        return self.method != "POST" or KEY_HEADER in self.headers


def _request(
    method: str,
    path: str,
    body: msgspec.Struct | msgspec.Raw | bytes | RequestBody | None,
    query: Mapping[str, object],
    headers: Mapping[str, str],
) -> _Request:
    given = {name: value for name, value in query.items() if value not in ("", None)}
    target = f"{API}{path}{'?' if given else ''}{urlencode(given, doseq=True)}"
    head = {"Accept": "application/json", **headers}
    if body is None:
        return _Request(method, target, None, head)
    if not isinstance(body, bytes | RequestBody):
        return _Request(method, target, msgspec.json.encode(body), {**head, "Content-Type": "application/json"})
    head["Content-Type"] = "application/octet-stream"
    if isinstance(body, RequestBody):
        head["Content-Length"] = str(body.size_bytes)
    return _Request(method, target, body, head)


def _error(status: int, data: bytes) -> FireflyerError:
    try:
        found = decode_json(data, ErrorView)
    except DECODE_ERRORS:
        return PermanentError(f"the platform answered with status {status}")
    message = "".join(char if char.isprintable() else "?" for char in found.message)[:1000]
    kind = _KINDS.get(found.code, TransientError if status == http.client.SERVICE_UNAVAILABLE else PermanentError)
    return PermissionDenied(message) if status == http.client.UNAUTHORIZED else kind(message)


def _events(response: http.client.HTTPResponse, kind: Any) -> Iterator[tuple[str, Any]]:
    """Server-sent events: `id:` and `data:` lines, ended by an empty line; lines that begin with a colon are
    comments."""
    number, data = "", b""
    while True:
        try:
            line = response.readline(MAX_EVENT_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"the stream of events broke: {error}") from None
        if not line:
            raise Unreachable("the stream of events ended")
        line = line.rstrip(b"\r\n")
        if line.startswith(b":"):
            yield "", None
        elif line.startswith(b"id:"):
            number = line[3:].decode(errors="replace").strip()
        elif line.startswith(b"data:"):
            data = line[5:].strip()
        elif not line and data:
            try:
                yield number, decode_json(data, kind)
            except DECODE_ERRORS:
                raise DataCorruption(f"not an event: {json.dumps(data[:80].decode(errors='replace'))}") from None
            number, data = "", b""
