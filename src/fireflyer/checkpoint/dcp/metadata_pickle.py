"""The pickle `.metadata` of DCP's `FileSystemWriter`, loaded without the classes that it names.

    unpickle into records, which only keep their state -> check each state -> make DCP's objects

A pickle calls what it names and sets any attribute of it, of classes and functions too. So it gets none of DCP's
classes: it gets stand-ins that nothing can be set on, and that keep one state each. DCP's objects are made afterwards,
by us, from states that have the fields and types of their class.
"""

from __future__ import annotations

import collections
import io
import pathlib
import pickle
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, Final

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata

from fireflyer.checkpoint.dcp.pickle_scan import check_operations

__all__ = ["StorageInfo", "load_metadata"]

_MAX_DIMS: Final = 64
_MAX_ELEMENTS: Final = 1 << 60
"""In one dimension. Larger ones are of no tensor, and hashes of numbers are alike from 2**61 - 1 on."""
_MAX_PATH: Final = 256
"""Keys on the way to a value of the nested state."""
StorageInfo = filesystem._StorageInfo  # noqa: SLF001 - part of DCP's format
_Format = dcp_metadata._MEM_FORMAT_ENCODING  # noqa: SLF001 - part of DCP's format
_LAYOUTS: Final = {str(each): each for each in vars(torch).values() if isinstance(each, torch.layout)}


def load_metadata(content: bytes, *, trusted: bool = False) -> object:
    """What the pickle holds: a `Metadata` whose every field has the type that DCP gives it, or something else that
    is harmless. Raises `pickle.UnpicklingError` for what DCP does not write, and anything for a damaged pickle. If
    `trusted` it may hold and run anything."""
    if trusted:
        unpickler = pickle.Unpickler
        return unpickler(io.BytesIO(content)).load()
    check_operations(content)
    found = _Unpickler(io.BytesIO(content)).load()
    return _Making().record(found, dcp_metadata.Metadata) if isinstance(found, _Record) else found


class _Fixed(type):
    """A class that no attribute can be set on."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"it sets {name[:80]!r} of a class")


class _Record(metaclass=_Fixed):
    """Stands for an instance of one of DCP's classes."""

    __slots__ = ("state",)
    state: object

    def __setstate__(self, state: object) -> None:
        if hasattr(self, "state"):
            raise pickle.UnpicklingError("it sets the state of an object twice")
        self.state = state


class _MemoryFormat:
    """Stands for the enumeration of memory formats. Of it or of a name in it comes the number."""

    __slots__ = ()

    def __call__(self, value: object) -> int:
        return int(_Format(value).value)


class _Attribute:
    """Stands for `getattr`, by which some releases of Python 3.11 pickle the members of enumerations."""

    __slots__ = ()

    def __call__(self, kind: object, name: object) -> int:
        if not (isinstance(kind, _MemoryFormat) and isinstance(name, str) and name in _Format.__members__):
            raise pickle.UnpicklingError("it takes an attribute of something that is no enumeration")
        return int(_Format.__members__[name].value)


class _Layout:
    """Stands for the function of `torch.serialization` by which layouts are pickled."""

    __slots__ = ()

    def __call__(self, name: object) -> torch.layout:
        if not isinstance(name, str) or name not in _LAYOUTS:
            raise pickle.UnpicklingError("it has an unknown layout")
        return _LAYOUTS[name]


class _Parts:
    """Of a path, which is made of them when the pickle has been read: a text could be made a part of the next one,
    and so grow twofold with each operation."""

    __slots__ = ("_parts",)

    def __init__(self, parts: tuple[str, ...]) -> None:
        self._parts = parts

    def text(self) -> str:
        return str(pathlib.PurePosixPath(*self._parts))


class _Path:
    """Stands for `PosixPath`."""

    __slots__ = ()

    def __call__(self, *parts: object) -> _Parts:
        return _Parts(tuple(_names(parts)))


class _Size:
    """Stands for `torch.Size`."""

    __slots__ = ()

    def __call__(self, values: object) -> torch.Size:
        if not isinstance(values, (tuple, list)) or len(values) > _MAX_DIMS:
            raise _wrong("the size of a tensor", values)
        if not all(type(one) is int and 0 <= one < _MAX_ELEMENTS for one in values):
            raise pickle.UnpicklingError("a size of a tensor is no number, negative or too large")
        return torch.Size(values)


class _OrderedDict:
    """Stands for `OrderedDict`, which is pickled empty; its items come after."""

    __slots__ = ()

    def __call__(self) -> dict[Any, Any]:
        return {}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is nothing that DCP writes")
        return _ALLOWED[module, name]


_CLASSES: Final[tuple[type[Any], ...]] = (
    dcp_metadata.Metadata,
    dcp_metadata.MetadataIndex,
    dcp_metadata.TensorStorageMetadata,
    dcp_metadata.BytesStorageMetadata,
    dcp_metadata.ChunkStorageMetadata,
    dcp_metadata.TensorProperties,
    dcp_metadata.StorageMeta,
    StorageInfo,
)
_REAL: Final[dict[type[Any], type[Any]]] = {
    _Fixed(each.__name__, (_Record,), {"__slots__": ()}): each for each in _CLASSES
}


def _allowed() -> dict[tuple[str, str], Any]:
    """Nothing in it has attributes that can be set."""
    found: dict[tuple[str, str], Any] = {(real.__module__, real.__qualname__): each for each, real in _REAL.items()}
    found[_Format.__module__, _Format.__qualname__] = _MemoryFormat()
    found["builtins", "getattr"] = _Attribute()
    found["torch.serialization", "_get_layout"] = _Layout()
    found["torch", "Size"] = _Size()
    found[collections.OrderedDict.__module__, collections.OrderedDict.__qualname__] = _OrderedDict()
    for module, name in (("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"), ("pathlib", "Path"),
                         ("pathlib", "PurePosixPath")):  # fmt: skip
        found[module, name] = _Path()
    for kind in (torch.dtype, torch.layout, torch.memory_format):
        found |= {("torch", name): each for name, each in vars(torch).items() if isinstance(each, kind)}
    return found


_ALLOWED: Final = _allowed()


class _Making:
    """Makes DCP's objects of records, each once, however often it is named: the work is bound by the pickle's size."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}

    def record(self, found: object, *kinds: type[Any]) -> Any:
        real = _REAL.get(type(found))
        if real is None or real not in kinds or not isinstance(found, _Record):
            raise pickle.UnpicklingError(f"it has something else where a {kinds[0].__name__} is due")
        if id(found) not in self._made:
            self._made[id(found)] = self._instance(real, getattr(found, "state", None))
        return self._made[id(found)]

    def _instance(self, real: type[Any], state: object) -> Any:
        made: Any = object.__new__(real)
        if real is dcp_metadata.TensorProperties:
            made.__setstate__(_properties(state))
            return made
        given = {} if state is None else state
        if not isinstance(given, dict):
            raise pickle.UnpicklingError(f"the state of a {real.__name__} is no mapping")
        known = {one.name: one for one in fields(real)}
        for name, one in known.items():
            if name not in given and one.default is MISSING and one.default_factory is MISSING:
                raise pickle.UnpicklingError(f"a {real.__name__} has no {name}")
        check = self._checks()[real]
        # What other programs add, as Megatron's planner does to `Metadata`, is of no use here.
        vars(made).update({name: check[name](value) for name, value in given.items() if name in known})
        for name, one in known.items():  # of releases of torch that did not have the field
            if name not in given and one.default_factory is not MISSING:
                vars(made)[name] = one.default_factory()
        return made

    def _checks(self) -> dict[type[Any], dict[str, Callable[[Any], Any]]]:
        return {
            dcp_metadata.Metadata: {
                "state_dict_metadata": self._described,
                "planner_data": self._paths,
                "storage_data": self._places,
                "storage_meta": self._storage_meta,
                "version": _text,
            },
            dcp_metadata.MetadataIndex: {"fqn": _name, "offset": _optional_size, "index": _optional_number},
            dcp_metadata.TensorStorageMetadata: {
                "properties": lambda one: self.record(one, dcp_metadata.TensorProperties),
                "size": _size,
                "chunks": self._chunks,
            },
            dcp_metadata.BytesStorageMetadata: {},
            dcp_metadata.ChunkStorageMetadata: {"offsets": _size, "sizes": _size},
            dcp_metadata.StorageMeta: {
                "checkpoint_id": _text, "save_id": _text, "load_id": _text, "modules": _names,
            },
            StorageInfo: {
                "relative_path": _scalar, "offset": _scalar, "length": _scalar,
                "transform_descriptors": _optional_names,
            },
        }  # fmt: skip

    def _described(self, found: object) -> dict[str, Any]:
        kinds = (dcp_metadata.TensorStorageMetadata, dcp_metadata.BytesStorageMetadata)
        return {_name(key): self.record(value, *kinds) for key, value in _mapping(found).items()}

    def _places(self, found: object) -> dict[Any, Any]:
        index = dcp_metadata.MetadataIndex
        return {self.record(key, index): self.record(value, StorageInfo) for key, value in _mapping(found).items()}

    def _storage_meta(self, found: object) -> Any:
        return None if found is None else self.record(found, dcp_metadata.StorageMeta)

    def _paths(self, found: object) -> dict[str, tuple[str | int, ...]] | None:
        """Of DCP's own planners: where in the nested state each name is."""
        if found is None:
            return None
        return {_name(key): self._path(value) for key, value in _mapping(found).items()}

    def _path(self, found: object) -> tuple[str | int, ...]:
        if id(found) not in self._made:
            self._made[id(found)] = _path(found)
        made: tuple[str | int, ...] = self._made[id(found)]
        return made

    def _chunks(self, found: object) -> list[Any]:
        if not isinstance(found, list):
            raise pickle.UnpicklingError("the chunks of a tensor are no list")
        if id(found) not in self._made:
            self._made[id(found)] = [self.record(one, dcp_metadata.ChunkStorageMetadata) for one in found]
        made: list[Any] = self._made[id(found)]
        return made


def _wrong(what: str, found: object) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(f"it has a {type(found).__name__} where {what} is due")


def _mapping(found: object) -> dict[Any, Any]:
    if not isinstance(found, dict):
        raise _wrong("a mapping", found)
    return found


def _name(found: object) -> str:
    if not isinstance(found, str):
        raise _wrong("a name", found)
    return found


def _text(found: object) -> str | None:
    if isinstance(found, _Parts):
        return found.text()
    return None if found is None else _name(found)


def _names(found: object) -> list[str]:
    if not isinstance(found, (list, tuple)) or len(found) > _MAX_PATH:
        raise _wrong("a short list of names", found)
    return [_name(one) for one in found]


def _optional_names(found: object) -> list[str] | None:
    return None if found is None else _names(found)


def _optional_number(found: object) -> int | None:
    if found is not None and type(found) is not int:
        raise _wrong("a number", found)
    return found


def _size(found: object) -> torch.Size:
    if not isinstance(found, torch.Size):
        raise _wrong("the size of a tensor", found)
    return found


def _optional_size(found: object) -> torch.Size | None:
    return None if found is None else _size(found)


def _scalar(found: object) -> str | int | None:
    """Whether it is the right one is looked at where places are."""
    if not isinstance(found, (str, int, type(None))):
        raise _wrong("a text or a number", found)
    return found


def _path(found: object) -> tuple[str | int, ...]:
    keys = found if isinstance(found, (list, tuple)) and len(found) <= _MAX_PATH else None
    if keys is None or not all(isinstance(key, (str, int)) for key in keys):
        raise _wrong("a path in the nested state", found)
    return tuple(keys)


def _properties(state: object) -> tuple[Any, ...]:
    match state:
        case (torch.dtype(), torch.layout(), bool(), int() as memory_format, bool()) if isinstance(state, tuple):
            return (*state[:3], _Format(memory_format), state[4])
    raise _wrong("the properties of a tensor", state)
