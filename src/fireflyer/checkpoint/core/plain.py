"""Plain values: what a manifest holds beside tensors, as JSON that gives back exactly what was saved.

States of schedulers and the like also have floats that are not finite and keys that are no text (`ReduceLROnPlateau`,
`MultiStepLR`). `encode_state` makes plain values of those, and `decode_state` makes them again:

    inf, -inf, nan      {"fireflyer.float": "inf"}
    {10: 1}             {"fireflyer.mapping": [[10, 1]]}
    Counter([10])       {"fireflyer.counter": [[10, 1]]}

All else is stored as it is, so that other releases read it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from fireflyer.base.errors import DataCorruption, UsageError

__all__ = ["check_plain", "decode_state", "encode_state"]

_MAX_DEPTH: Final = 64
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_FLOAT, _MAPPING, _COUNTER = "fireflyer.float", "fireflyer.mapping", "fireflyer.counter"
_FORMS: Final = (_FLOAT, _MAPPING, _COUNTER)
_FLOATS: Final = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def check_plain(value: object, what: str, depth: int = 0) -> Any:
    """A copy of `value` with tuples as lists, if it survives JSON exactly. Raises `UsageError` naming what does not."""
    _check_depth(what, depth)
    if _is_scalar(value, what):
        return _scalar(value)
    if isinstance(value, list | tuple):
        return [check_plain(inner, f"{what}[{index}]", depth + 1) for index, inner in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise UsageError(f"{what} has the key {key!r}; keys must be text")
            _check_text(key, f"a key of {what}")
        return {key: check_plain(inner, f"{what}[{key!r}]", depth + 1) for key, inner in value.items()}
    raise _refusal(value, what)


def encode_state(value: object, what: str, depth: int = 0) -> Any:
    """What `check_plain` takes, of which `decode_state` makes `value` again, but for tuples, which become lists. Raises
    `UsageError` naming what cannot be stored."""
    _check_depth(what, depth)
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(float(value))}
    if _is_scalar(value, what):
        return _scalar(value)
    if isinstance(value, list | tuple):
        return [encode_state(inner, f"{what}[{index}]", depth + 1) for index, inner in enumerate(value)]
    if isinstance(value, Mapping):
        inner = {key: encode_state(one, f"{what}[{key!r}]", depth + 1) for key, one in value.items()}
        if not isinstance(value, Counter) and all(isinstance(key, str) and key not in _FORMS for key in inner):
            for key in inner:
                _check_text(key, f"a key of {what}")
            return inner
        pairs = [[_encode_key(key, what), one] for key, one in inner.items()]
        return {_COUNTER if isinstance(value, Counter) else _MAPPING: pairs}
    raise _refusal(value, what)


def _encode_key(key: object, what: str) -> Any:
    if isinstance(key, Mapping | list | tuple):
        raise UsageError(f"{what} has the key {key!r}; keys must be text or numbers")
    return encode_state(key, f"a key of {what}")


def decode_state(value: Any, depth: int = 0) -> Any:
    """Raises `DataCorruption` for what `encode_state` does not give."""
    if depth > _MAX_DEPTH:
        raise DataCorruption(f"the values are nested more than {_MAX_DEPTH} levels deep")
    if isinstance(value, list):
        return [decode_state(inner, depth + 1) for inner in value]
    if not isinstance(value, dict):
        return value
    form = next(iter(value)) if len(value) == 1 else None
    if form not in _FORMS:
        return {key: decode_state(inner, depth + 1) for key, inner in value.items()}
    inner = value[form]
    try:
        if form == _FLOAT:
            return _FLOATS[inner]
        found = {decode_state(key): decode_state(one, depth + 1) for key, one in inner}
    except (KeyError, TypeError, ValueError):
        raise DataCorruption(f"the values hold {str(value)[:80]}, which no release writes") from None
    return Counter(found) if form == _COUNTER else found


def _check_depth(what: str, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise UsageError(f"{what[:200]} is nested more than {_MAX_DEPTH} levels deep")


def _is_scalar(value: object, what: str) -> bool:
    """Whether it is stored as one value. Raises `UsageError` for text that UTF-8 cannot hold."""
    if isinstance(value, str):
        _check_text(value, what)
        return True
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool) or (isinstance(value, int) and -(2**63) <= value < 2**64)


def _scalar(value: Any) -> Any:
    """Without what a subclass adds."""
    if value is None or isinstance(value, bool | str):
        return value
    return int(value) if isinstance(value, int) else float(value)


def _check_text(text: str, what: str) -> None:
    if not text.isascii() and _SURROGATE.search(text) is not None:
        raise UsageError(
            f"{what} is the text {text[:40]!r}, which is no valid Unicode (half of a surrogate pair); store the bytes "
            "that it stands for as a tensor, or decode them with errors='replace'"
        )


def _refusal(value: object, what: str) -> UsageError:
    return UsageError(
        f"{what} is {type(value).__name__} {str(value)[:40]!r}; allowed are None, bool, text, finite floats, "
        "integers below 2**64, and lists and mappings of them"
    )
