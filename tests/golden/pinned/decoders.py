"""Which types the code decodes, found in its source.

A call of a function of `base.decoding` names a type, or passes on one that its function was given: then the calls of
that function name it, and so on. A class that keeps the type in an attribute is treated as its constructor. What cannot
be followed, and what calls msgspec itself, is an error that names the place, so that no decoder is overlooked.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

import fireflyer
from fireflyer.base import decoding

__all__ = ["ROOT", "Call", "Decoded", "Module", "decoded_types", "modules", "rpc_methods"]

ROOT: Final = Path(fireflyer.__file__).parent
_MOST_STEPS: Final = 6
_KINDS: Final = {
    id(decoding.json_decoder): "json",
    id(decoding.decode_json): "json",
    id(decoding.decode_published): "json",
    id(decoding.msgpack_decoder): "msgpack",
    id(decoding.decode_msgpack): "msgpack",
    id(decoding.decode_toml): "toml",
    id(decoding.convert): "object",
}
_OF_MSGSPEC: Final = {
    id(one)
    for codec in (msgspec.json, msgspec.msgpack, msgspec.toml, msgspec.yaml)
    for one in (getattr(codec, "Decoder", None), codec.decode)
} | {id(msgspec.convert)}
"""Not to be called: they use structs that no lock has prepared."""
_DECODERS: Final = ("json_decoder", "msgpack_decoder")
_NAMES: Final = (
    *_DECODERS, "decode_json", "decode_published", "decode_msgpack", "decode_toml", "convert", "Decoder", "decode"
)  # fmt: skip
_OWNER: Final = Path(decoding.__file__)


class Decoded(NamedTuple):
    """A type and how it is encoded: `json`, `msgpack`, `toml`, or `object` for what other code has decoded."""

    codec: str
    kind: Any
    where: str


@dataclass(frozen=True)
class Module:
    """A source file of the package."""

    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def calls(self) -> list[Call]:
        found: list[Call] = []
        _find_calls(found, self, self.tree, ())
        return found

    @cached_property
    def namespace(self) -> dict[str, Any]:
        """What its names mean, imported."""
        if self.path.name == "__main__.py":
            return self._imported()
        parts = self.path.relative_to(ROOT.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        return {"msgspec": msgspec, **vars(importlib.import_module(name))}

    def _imported(self) -> dict[str, Any]:
        """Of a program, which begins when it is imported: what it imports."""
        names: dict[str, Any] = {}
        imports: list[ast.stmt] = [node for node in self.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        exec(compile(ast.Module(imports, []), str(self.path), "exec"), names)
        return {"msgspec": msgspec, **names}


@dataclass(frozen=True)
class Call:
    module: Module
    node: ast.Call
    around: tuple[ast.AST, ...]
    """The functions and classes that it is in, outermost first."""

    @property
    def name(self) -> str:
        function = self.node.func
        return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")

    @property
    def where(self) -> str:
        return f"{self.module.path.relative_to(ROOT.parent)}:{self.node.lineno}"

    def argument(self, name: str, position: int) -> ast.expr | None:
        named = [word.value for word in self.node.keywords if word.arg == name]
        if named or position >= len(self.node.args):
            return named[0] if named else None
        return self.node.args[position]

    def value(self, expression: ast.expr) -> Any:
        """Of an expression in this place. Raises whatever evaluating it raises."""
        names = dict(self.module.namespace)
        for outer in self.around:
            for node in ast.walk(outer):
                if isinstance(node, ast.ImportFrom) and node.module:
                    home = importlib.import_module(node.module)
                    names |= {one.asname or one.name: getattr(home, one.name) for one in node.names}
        return eval(compile(ast.Expression(expression), self.where, "eval"), names)


@lru_cache(maxsize=1)
def modules() -> tuple[Module, ...]:
    return tuple(Module(path, path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("*.py")))


_SCOPES: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _find_calls(found: list[Call], module: Module, node: ast.AST, around: tuple[ast.AST, ...]) -> None:
    """Appends the calls below `node`, outer ones first; a generator for each node took a third of the time."""
    for field in node._fields:
        inside = getattr(node, field, None)
        for child in inside if isinstance(inside, list) else (inside,):
            if isinstance(child, ast.AST) and child._fields:
                if isinstance(child, ast.Call):
                    found.append(Call(module, child, around))
                _find_calls(found, module, child, (*around, child) if isinstance(child, _SCOPES) else around)


def _calls_of(name: str) -> Iterator[Call]:
    for module in modules():
        if f"{name}(" in module.text:
            yield from (call for call in module.calls if call.name == name)


def decoded_types() -> list[Decoded]:
    """Raises `ValueError` naming a decoder whose type cannot be followed."""
    found: list[Decoded] = []
    for module in modules():
        if module.path == _OWNER or not any(one in module.text for one in ("msgspec", "base.decoding")):
            continue
        for call in module.calls:
            if call.name in _NAMES and (codec := _codec(call)):
                expression = call.argument("kind", 0 if call.name in _DECODERS else 1)
                if expression is None:
                    raise ValueError(f"{call.where} decodes without a type: give one, so that its format is recorded")
                found += [Decoded(codec, kind, where) for kind, where in _resolved(call, expression, 0)]
    return found


def _codec(call: Call) -> str | None:
    try:
        called = id(call.value(call.node.func))
    except (NameError, AttributeError) as error:
        if call.name == "Decoder" or any(word.arg == "type" for word in call.node.keywords):
            raise ValueError(f"{call.where}: what decodes there cannot be followed: {error}") from error
        return None
    if called in _OF_MSGSPEC:
        raise ValueError(
            f"{call.where} calls msgspec: use base.decoding, as threads that use a struct first end the process"
        )
    return _KINDS.get(called)


def _resolved(call: Call, expression: ast.expr, steps: int) -> Iterator[tuple[Any, str]]:
    passed_on = _passed_on(call, expression)
    if passed_on is None:
        try:
            yield call.value(expression), call.where
        except (NameError, AttributeError) as error:
            raise ValueError(f"{call.where}: the type that is decoded there cannot be followed: {error}") from error
        return
    name, parameter, position = passed_on
    callers = [caller for caller in _calls_of(name) if caller.module is call.module or not name.startswith("_")]
    if not callers or steps == _MOST_STEPS:
        raise ValueError(f"{call.where}: nobody was found who gives the {parameter} that is decoded there")
    for caller in callers:
        if (given := caller.argument(parameter, position)) is not None:
            yield from _resolved(caller, given, steps + 1)


def _passed_on(call: Call, expression: ast.expr) -> tuple[str, str, int] | None:
    """(function, parameter, its position) that the type comes from."""
    classes = [node for node in call.around if isinstance(node, ast.ClassDef)]
    functions = [node for node in call.around if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    if isinstance(expression, ast.Name):
        for function in reversed(functions):
            names = [argument.arg for argument in function.args.args]
            if expression.id in names + [argument.arg for argument in function.args.kwonlyargs]:
                method = bool(names) and names[0] in ("self", "cls")
                at = names.index(expression.id) - method if expression.id in names else 99
                is_constructor = function.name == "__init__"
                return (classes[-1].name if is_constructor else function.name), expression.id, at
    if (
        isinstance(expression, ast.Attribute)
        and isinstance(expression.value, ast.Name)
        and expression.value.id == "self"
    ):
        return _attribute(classes[-1], expression.attr)
    return None


def _attribute(owner: ast.ClassDef, name: str) -> tuple[str, str, int] | None:
    fields = [
        node.target.id for node in owner.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    if name in fields:
        return owner.name, name, fields.index(name)
    for function in owner.body:
        if isinstance(function, ast.FunctionDef) and function.name == "__init__":
            names = [argument.arg for argument in function.args.args][1:]
            for node in ast.walk(function):
                kept = isinstance(node, ast.Assign) and any(
                    isinstance(target, ast.Attribute) and target.attr == name for target in node.targets
                )
                if (
                    isinstance(node, ast.Assign)
                    and kept
                    and isinstance(node.value, ast.Name)
                    and node.value.id in names
                ):
                    return owner.name, node.value.id, names.index(node.value.id)
    return None


def rpc_methods() -> list[str]:
    """The names on the wire of the methods that the package declares."""
    from fireflyer.runtime.rpc import Method

    return sorted(call.value(call.node.args[0]) for call in _calls_of(Method.__name__) if len(call.node.args) == 3)
