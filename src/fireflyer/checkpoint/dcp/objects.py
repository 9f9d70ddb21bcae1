"""What a DCP state holds beside tensors: plain values in the manifest where they are plain, else what torch.save made.

DCP hands such objects to a storage as bytes of `torch.save`, and wants such bytes back. Plain ones (numbers, text,
lists and mappings of them) become values of the manifest, which are JSON. Others are stored as a tensor of bytes; they
are handed out only where `torch.load(weights_only=True)` takes them, as DCP's planners load them without that check.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.checkpoint.core.plain import check_plain

__all__ = ["BYTES_PREFIX", "VALUES_KEY", "check_safe", "plain_value", "saved_bytes"]

VALUES_KEY = "dcp"
"""Of `Manifest.values`: `{"paths": {name: path in the nested state}, "values": {name: plain value}}`."""
BYTES_PREFIX = "bytes/"
"""Of the name of a tensor that holds what `torch.save` made of an object."""


def plain_value(data: bytes) -> tuple[bool, Any]:
    """Whether what was saved is a plain value that JSON gives back exactly, and that value."""
    try:
        value = torch.load(io.BytesIO(data), weights_only=True)
        plain = check_plain(value, "value")
    except (UsageError, pickle.UnpicklingError, RuntimeError, EOFError):
        return False, None
    return _same(value, plain), plain


def _same(value: Any, plain: Any) -> bool:
    """Also in types: JSON would make a list of a tuple, and a dict of an OrderedDict."""
    if type(value) is not type(plain):
        return False
    if isinstance(value, list):
        return all(_same(one, other) for one, other in zip(value, plain, strict=True))
    if isinstance(value, dict):
        return all(_same(inner, plain[key]) for key, inner in value.items())
    return bool(value == plain)


def saved_bytes(value: Any) -> bytes:
    """What DCP's planners load as `value`."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def check_safe(data: bytes, what: str) -> None:
    """Raises `DataCorruption` for what could run code when it is loaded."""
    try:
        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, IndexError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataCorruption(
            f"{what} holds an object that torch.load(weights_only=True) refuses ({reason[:200]}); if you trust who "
            "wrote it, give trust_pickles=True"
        ) from error
