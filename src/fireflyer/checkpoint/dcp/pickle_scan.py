"""What a pickle would make `pickle.Unpickler` do, looked at before it does it.

The unpickler of CPython gives a memo as many slots as an index of 5 bytes asks for, and a hash of tuples in tuples
recurses in C: a pickle of a few MB takes all memory, or ends the process. Both, and operations that the metadata of DCP
has no use for, are refused here; what is left takes memory and time in proportion to the pickle.
"""

from __future__ import annotations

import pickle
import pickletools
from typing import Final

__all__ = ["check_operations"]

_MAX_NESTED: Final = 32
"""Tuples in tuples; DCP writes three."""
_REFUSED: Final = frozenset(
    {"ADDITEMS", "BINPERSID", "BYTEARRAY8", "DUP", "EMPTY_SET", "EXT1", "EXT2", "EXT4", "FROZENSET", "INST",
     "NEWOBJ_EX", "NEXT_BUFFER", "OBJ", "PERSID", "READONLY_BUFFER"}
)  # fmt: skip
_PUTS: Final = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_GETS: Final = frozenset({"GET", "BINGET", "LONG_BINGET"})
_TUPLES: Final = frozenset({"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"})
_MARK: Final = -1
"""On the stack; every other entry is how deep tuples are nested in it."""


def check_operations(content: bytes) -> None:
    """Raises `pickle.UnpicklingError` for operations that DCP does not write, and `ValueError` for a pickle that is cut
    off or holds what is no operation."""
    stack: list[int] = []
    memo: dict[int, int] = {}
    for operation, argument, _ in pickletools.genops(content):
        name = operation.name
        if name in _REFUSED:
            raise pickle.UnpicklingError(f"it has the operation {name}, which DCP does not write")
        taken = _take(stack, operation)
        if name in _PUTS or name == "MEMOIZE":
            index = len(memo) if argument is None else int(argument)
            if index > len(memo) or not stack:
                raise pickle.UnpicklingError("it keeps something in a place that is far behind the last")
            memo[index] = stack[-1]
        elif name in _GETS:
            stack.append(memo.get(int(argument or 0), 0))
        elif name in _TUPLES:
            nested = 1 + max(taken, default=0)
            if nested > _MAX_NESTED:
                raise pickle.UnpicklingError(f"it has {nested} tuples in each other")
            stack.append(nested)
        else:
            stack.extend(_MARK if one is pickletools.markobject else 0 for one in operation.stack_after)


def _take(stack: list[int], operation: pickletools.OpcodeInfo) -> list[int]:
    """What the operation takes off the stack."""
    before = operation.stack_before
    taken: list[int] = []
    count = len(before)
    if operation.name in _PUTS or operation.name == "MEMOIZE":
        return taken
    if pickletools.markobject in before:
        count = before.index(pickletools.markobject)
        while stack and stack[-1] != _MARK:
            taken.append(stack.pop())
        if not stack:
            raise pickle.UnpicklingError("it takes more than there is")
        stack.pop()
    if count > len(stack):
        raise pickle.UnpicklingError("it takes more than there is")
    taken.extend(stack.pop() for _ in range(count))
    return taken
