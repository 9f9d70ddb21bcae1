"""What RPC frames carry, and the description of a method that both ends share.

Five messages, msgpack arrays with an integer tag: a *call* and a *notification* (no answer) carry the nanoseconds that
are left until their deadline, a *reply* or a *failure* answers a call by its id, a *cancel* gives a call up. Bodies are
decoded in a second step, when the method and thereby the type is known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec

from fireflyer.base.decoding import msgpack_decoder
from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND

__all__ = [
    "MAX_ERROR_CHARS",
    "MAX_METHOD_BYTES",
    "MAX_TIMEOUT_NS",
    "Call",
    "Cancel",
    "Failure",
    "FromClient",
    "FromServer",
    "Method",
    "Notification",
    "Reply",
    "Req",
    "Resp",
    "check_timeout",
    "encode",
    "from_client_decoder",
    "from_server_decoder",
]

MAX_METHOD_BYTES: Final = 128
MAX_ERROR_CHARS: Final = 4096
MAX_TIMEOUT_NS: Final = 7 * 24 * 3600 * SECOND

Req = TypeVar("Req")
Resp = TypeVar("Resp")

_Id = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
_Timeout = Annotated[int, msgspec.Meta(ge=1, le=MAX_TIMEOUT_NS)]
_MethodName = Annotated[str, msgspec.Meta(max_length=MAX_METHOD_BYTES, pattern=r"\A[!-~]*\Z")]
"""What a client sends stands in the log: a name has no spaces and no control characters."""


class Call(msgspec.Struct, frozen=True, array_like=True, tag=1):
    id: _Id
    method: _MethodName
    timeout_ns: _Timeout
    body: msgspec.Raw


class Notification(msgspec.Struct, frozen=True, array_like=True, tag=2):
    method: _MethodName
    timeout_ns: _Timeout
    body: msgspec.Raw


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=3):
    id: _Id


class Reply(msgspec.Struct, frozen=True, array_like=True, tag=4):
    id: _Id
    body: msgspec.Raw


class Failure(msgspec.Struct, frozen=True, array_like=True, tag=5):
    id: _Id
    code: Annotated[str, msgspec.Meta(max_length=64)]
    message: Annotated[str, msgspec.Meta(max_length=MAX_ERROR_CHARS)]


FromClient = Call | Notification | Cancel
FromServer = Reply | Failure

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
from_client_decoder = msgpack_decoder(FromClient)
from_server_decoder = msgpack_decoder(FromServer)


@dataclass(frozen=True)
class Method(Generic[Req, Resp]):
    """A remote procedure: its name on the wire (`"service.verb"`) and the types of its request and response, which are
    msgspec structs or anything else that msgspec checks on decoding. `None` stands for nothing to say."""

    name: str
    request_type: type[Req]
    response_type: type[Resp]
    _request_decoder: msgspec.msgpack.Decoder[Any] = field(init=False, repr=False, compare=False)
    _response_decoder: msgspec.msgpack.Decoder[Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < len(self.name.encode()) <= MAX_METHOD_BYTES:
            raise UsageError(f"method name {self.name[:40]!r} must have 1 to {MAX_METHOD_BYTES} bytes")
        object.__setattr__(self, "_request_decoder", msgpack_decoder(self.request_type))
        object.__setattr__(self, "_response_decoder", msgpack_decoder(self.response_type))

    def decode_request(self, body: msgspec.Raw) -> Req:
        """Raises `msgspec.DecodeError` (of which `msgspec.ValidationError` is one kind)."""
        request: Req = self._request_decoder.decode(body)
        return request

    def decode_response(self, body: msgspec.Raw) -> Resp:
        response: Resp = self._response_decoder.decode(body)
        return response


def check_timeout(timeout_ns: int) -> int:
    """Raises `UsageError` unless 0 < `timeout_ns` <= `MAX_TIMEOUT_NS`."""
    if not 0 < timeout_ns <= MAX_TIMEOUT_NS:
        raise UsageError(f"timeout_ns {timeout_ns} must be from 1 to {MAX_TIMEOUT_NS} (7 days)")
    return timeout_ns
