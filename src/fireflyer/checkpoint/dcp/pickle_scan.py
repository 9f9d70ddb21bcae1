"""What a pickle would make `pickle.Unpickler` do, looked at before it does it.

The unpickler of CPython gives a memo as many slots as an index of 5 bytes asks for, and a hash of tuples in tuples
recurses in C: a pickle of a few MB takes all memory, or ends the process. Both, and operations that the metadata of DCP
has no use for, are refused here; what is left takes memory and time in proportion to the pickle.
"""

from __future__ import annotations

import pickle
import pickletools
from typing import Final, NamedTuple

__all__ = ["check_operations"]

_MAX_NESTED: Final = 32
"""Tuples in tuples; DCP writes three."""
_REFUSED: Final = frozenset(
    {"ADDITEMS", "BINPERSID", "BYTEARRAY8", "DUP", "EMPTY_SET", "EXT1", "EXT2", "EXT4", "FROZENSET", "INST",
     "NEWOBJ_EX", "NEXT_BUFFER", "OBJ", "PERSID", "READONLY_BUFFER"}
)  # fmt: skip
_PUTS: Final = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
_GETS: Final = frozenset({"GET", "BINGET", "LONG_BINGET"})
_TUPLES: Final = frozenset({"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"})
_MARK: Final = -1
"""On the stack; every other entry is how deep tuples are nested in it, at the most: what an operation makes counts as
deep as what it takes, since BUILD leaves a tuple as it is."""
_LENGTHS: Final = {
    pickletools.TAKEN_FROM_ARGUMENT1: (1, False),
    pickletools.TAKEN_FROM_ARGUMENT4: (4, True),
    pickletools.TAKEN_FROM_ARGUMENT4U: (4, False),
    pickletools.TAKEN_FROM_ARGUMENT8U: (8, False),
}
"""Of arguments that begin with their length: its bytes, and whether it has a sign."""


class _Operation(NamedTuple):
    name: str
    fixed: int
    """Bytes of its argument, or less than 0."""
    lines: int
    """That its argument takes."""
    length: tuple[int, bool] | None
    takes: int
    takes_mark: bool
    leaves: tuple[int, ...]


def _operation(one: pickletools.OpcodeInfo) -> _Operation:
    size = 0 if one.arg is None else one.arg.n
    lines = 0
    if size == pickletools.UP_TO_NEWLINE:
        lines = 2 if one.name in ("GLOBAL", "INST") else 1
    marked = pickletools.markobject in one.stack_before
    takes = one.stack_before.index(pickletools.markobject) if marked else len(one.stack_before)
    leaves = tuple(_MARK if kind is pickletools.markobject else 0 for kind in one.stack_after)
    return _Operation(one.name, size, lines, _LENGTHS.get(size), takes, marked, leaves)


_OPERATIONS: Final = {ord(one.code): _operation(one) for one in pickletools.opcodes}


def check_operations(content: bytes) -> None:
    """Raises `pickle.UnpicklingError` for operations that DCP does not write, and for a pickle that is cut off."""
    stack: list[int] = []
    memo: list[int] = []
    at = 0
    while True:
        begin = at
        if begin >= len(content) or (operation := _OPERATIONS.get(content[begin])) is None:
            raise pickle.UnpicklingError("it is cut off, or no pickle")
        at = _behind(content, begin + 1, operation)
        name = operation.name
        if name in _PUTS:
            _keep(stack, memo, len(memo) if name == "MEMOIZE" else _index(content[begin + 1 : at], operation))
        elif name in _GETS:
            index = _index(content[begin + 1 : at], operation)
            if index >= len(memo):
                raise pickle.UnpicklingError("it takes what it has not kept")
            stack.append(memo[index])
        elif name == "STOP":
            return
        elif name in _REFUSED:
            raise pickle.UnpicklingError(f"it has the operation {name}, which DCP does not write")
        else:
            nested = _take(stack, operation)
            if name in _TUPLES:
                if nested >= _MAX_NESTED:
                    raise pickle.UnpicklingError(f"it has {nested + 1} tuples in each other")
                stack.append(nested + 1)
            else:
                stack += [nested if one != _MARK else _MARK for one in operation.leaves]


def _behind(content: bytes, at: int, operation: _Operation) -> int:
    """Where the next operation begins."""
    if operation.fixed >= 0:
        return at + operation.fixed
    if operation.length is not None:
        size, signed = operation.length
        length = int.from_bytes(content[at : at + size], "little", signed=signed)
        return at + size + max(0, length)
    for _ in range(operation.lines):
        end = content.find(b"\n", at)
        if end < 0:
            raise pickle.UnpicklingError("it is cut off within a line")
        at = end + 1
    return at


def _index(argument: bytes, operation: _Operation) -> int:
    """Of PUT and GET a line, of others bytes."""
    if operation.fixed > 0:
        return int.from_bytes(argument, "little")
    if len(argument) > 20 or not argument[:-1].isdigit():
        raise pickle.UnpicklingError("it keeps something in a place that is no number")
    return int(argument)


def _keep(stack: list[int], memo: list[int], index: int) -> None:
    if index > len(memo) or not stack or stack[-1] == _MARK:
        raise pickle.UnpicklingError("it keeps something in a place that is far behind the last")
    memo[index : index + 1] = stack[-1:]


def _take(stack: list[int], operation: _Operation) -> int:
    """Takes from the stack what the operation does. How deep tuples are nested in that."""
    nested = 0
    if operation.takes_mark:
        while (top := _pop(stack)) != _MARK:
            nested = max(nested, top)
    for _ in range(operation.takes):
        top = _pop(stack)
        if top == _MARK and operation.name != "POP":
            raise pickle.UnpicklingError("it takes more than there is")
        nested = max(nested, top)
    return nested


def _pop(stack: list[int]) -> int:
    if not stack:
        raise pickle.UnpicklingError("it takes more than there is")
    return stack.pop()
