"""Names that others know and that are not fields: each kind is found in the code, and compared with its list.

Lists are in `tests/golden/names`, one name a line. What is only in the code is new: it is added with
`python -m tests.golden.pinned.record --add`. What is only in a list was renamed or removed, which no program adds.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, get_args

from tests.golden.pinned.decoders import ROOT, modules, rpc_methods
from tests.golden.pinned.outputs import keys_of_outputs

from fireflyer.base import errors
from fireflyer.fs.schema.meta import Request
from fireflyer.fs.service.meta.metrics import label_of
from fireflyer.runtime.metrics import Series
from fireflyer.runtime.sockets import authenticate_client

__all__ = ["KINDS", "LISTS", "list_file", "recorded_names"]

LISTS: Final = Path(__file__).parent.parent / "names"
_NATIVE: Final = ROOT.parent.parent / "cpp"

_VARIABLE: Final = re.compile(r"(FF|FIREFLYER)_[A-Z0-9_]+")
_ENDINGS: Final = r"\.(ffr|html|jsonl?|lock|log|mdb|partial|safetensors|toml)\b|node-secret"
_FILE: Final = re.compile(rf"[\w{{}}./-]*({_ENDINGS})")
_LABEL: Final = re.compile(rb"[a-z]+( [a-z0-9]+)+")
_PREFIX: Final = re.compile(rb"F[A-Z][A-Za-z]*")
_MAGIC: Final = re.compile(rb"(FF|ff|fireflyer )[^/]+", re.DOTALL)
_NATIVE_KEY: Final = re.compile(r'\["([a-z_]+)"\]')


def list_file(kind: str) -> Path:
    return LISTS / f"{kind}.txt"


def recorded_names(kind: str) -> set[str]:
    path = list_file(kind)
    return set(path.read_text(encoding="utf-8").splitlines()) if path.exists() else set()


def _texts_in(tree: ast.AST) -> Iterator[str]:
    """Without docstrings. `{}` stands for what is filled in."""
    if isinstance(tree, ast.Expr) and isinstance(tree.value, ast.Constant):
        return
    if isinstance(tree, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in tree.values)
        return
    if isinstance(tree, ast.Constant) and isinstance(tree.value, str):
        yield tree.value
    for child in ast.iter_child_nodes(tree):
        yield from _texts_in(child)


def _bytes(wanted: re.Pattern[bytes], hint: str) -> set[str]:
    """`hint`: found in the text of every module that may have some; the others are not read."""
    found = set()
    for module in modules():
        for node in ast.walk(module.tree) if re.search(hint, module.text) else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, bytes) and wanted.fullmatch(node.value):
                found.add(repr(node.value)[2:-1])
    return found


def _matching(wanted: re.Pattern[str], hint: str) -> set[str]:
    trees = [module.tree for module in modules() if re.search(hint, module.text)]
    return {text for tree in trees for text in _texts_in(tree) if wanted.fullmatch(text)}


def _file_names() -> set[str]:
    """The last part of paths, where it is more than an ending."""
    names = {path.rpartition("/")[2] for path in _matching(_FILE, _ENDINGS)}
    return {name for name in names if re.sub(rf"{{}}|{_ENDINGS}", "", name).strip(".-")}


def _metrics() -> set[str]:
    """Names, parts of names, labels and kinds: every plain word in a function that makes series."""
    found = set()
    for module in modules():
        if Series.__name__ not in module.text:
            continue
        for function in ast.walk(module.tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and _makes_series(function):
                found |= {text for text in _texts_in(function) if re.fullmatch(r"[a-z_{}]+", text)}
    return found


def _makes_series(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    returned = "" if function.returns is None else ast.unparse(function.returns)
    return Series.__name__ in returned


def _purposes() -> set[str]:
    """Of handshakes: what is given as `purpose`, or to functions that authenticate."""
    found = set()
    for module in modules():
        if "purpose" not in module.text.lower() and authenticate_client.__name__ not in module.text:
            continue
        for call in module.calls:
            given = [word.value for word in call.node.keywords if word.arg == "purpose"]
            if call.name == authenticate_client.__name__:
                given += call.node.args[3:4]
            if call.name == "acceptor":
                given += call.node.args[1:2]
            for expression in given:
                found |= set(_known(call.value, expression))
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("purpose"):
                found |= set(_texts_in(ast.Module(node.body, [])))
    return found


def _known(value: Callable[[ast.expr], Any], expression: ast.expr) -> Iterator[str]:
    yield from _texts_in(expression)
    if isinstance(expression, ast.Name | ast.Attribute):
        try:
            if isinstance(found := value(expression), str):
                yield found
        except (NameError, AttributeError):
            pass


def _error_codes() -> set[str]:
    """With the class that comes out of it, of which callers know the place in the tree."""
    found = set()
    for name in errors.__all__:
        kind = getattr(errors, name)
        if isinstance(kind, type) and issubclass(kind, errors.FireflyerError):
            found.add(" < ".join(one.code for one in kind.__mro__ if issubclass(one, errors.FireflyerError)))
    return found


def _native_keys() -> set[str]:
    """Of what native code tells: names of metrics, and of the fields of flight records."""
    sources = [path.read_text(encoding="utf-8") for path in sorted(_NATIVE.rglob("*.cpp"))]
    return {key for text in sources if "nanobind" in text for key in _NATIVE_KEY.findall(text)}


KINDS: Final[dict[str, Callable[[], set[str]]]] = {
    "environment": lambda: _matching(_VARIABLE, "(FF|FIREFLYER)_"),
    "error-codes": _error_codes,
    "file-names": _file_names,
    "json-outputs": keys_of_outputs,
    "key-labels": lambda: _bytes(_LABEL, 'b"[a-z]+ [a-z0-9]'),
    "magics": lambda: _bytes(_MAGIC, 'b"(FF|ff|fireflyer )'),
    "metrics": _metrics,
    "metric-labels-of-requests": lambda: {label_of(kind) for kind in get_args(Request)},
    "native-keys": _native_keys,
    "purposes": _purposes,
    "row-prefixes": lambda: _bytes(_PREFIX, 'b"F[A-Z]'),
    "rpc-methods": lambda: set(rpc_methods()),
}
