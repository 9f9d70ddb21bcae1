"""Which modules of a source tree import which, read from their text; and the import cycles among them.

An import is counted wherever it stands: at the top, in a function, under `TYPE_CHECKING`. All of them tie two modules
together for a reader. What an import of another module means here:

- `import a.b.c` and `from a.b import c`, where `a.b.c` is a module, depend on `a.b.c`.
- `from a.b import name`, where `name` is no module, depends on `a.b`: on its `__init__` if it is a package.
- Where `import_module` is used, a text that is the name of a module counts as an import of it.
- The `__init__` of each package that an import enters runs first, so it counts too; not that of a package which the
  importing module is in itself: else a package that lists its modules' names would be a cycle with each of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Cycle", "Edge", "cycles", "imports_of", "modules_of"]


@dataclass(frozen=True)
class Edge:
    """`source` depends on `target`, since line `line` of file `path`."""

    source: str
    target: str
    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.source} imports {self.target}"


@dataclass(frozen=True)
class Cycle:
    """Modules each of which depends on all others; `edges` are the imports among them."""

    modules: tuple[str, ...]
    edges: tuple[Edge, ...]

    def __str__(self) -> str:
        return "\n  ".join([f"import cycle of {len(self.modules)} modules:", *map(str, self.edges)])


def modules_of(root: Path, package: str) -> dict[str, Path]:
    """The modules below `root / package` by dotted name; a package by that of its `__init__.py`."""
    found = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(modules: Mapping[str, Path]) -> dict[str, tuple[Edge, ...]]:
    """For each module what it imports of the others, once each, in the order of the lines."""
    graph = {}
    for module, path in modules.items():
        edges: dict[str, Edge] = {}
        text = path.read_text()
        tree = ast.parse(text, str(path))
        names = [*_imported(tree, module, path)]
        if "import_module" in text:
            names += [(line, name) for line, name in _texts(tree) if name in modules]
        for line, name in sorted(names):
            for target in _entered(name, module, modules):
                edges.setdefault(target, Edge(module, target, path, line))
        graph[module] = tuple(edges.values())
    return graph


def cycles(graph: Mapping[str, Sequence[Edge]]) -> list[Cycle]:
    """The strongly connected components that have more than one module."""
    found = []
    for component in _components({module: [edge.target for edge in edges] for module, edges in graph.items()}):
        if len(component) > 1:
            members = sorted(component)
            inside = tuple(edge for module in members for edge in graph[module] if edge.target in component)
            found.append(Cycle(tuple(members), inside))
    return sorted(found, key=lambda cycle: cycle.modules)


def _imported(tree: ast.AST, module: str, path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each import. The last part may be a name in a module."""
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, path)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements, and what holds some. An expression holds none, and most of a tree is expressions."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            inside = getattr(node, block, None)
            if isinstance(inside, list):  # else the one expression of a lambda or of a condition
                left += inside


def _texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def _absolute(node: ast.ImportFrom, module: str, path: Path) -> str:
    """The name behind `from`, also where it begins with dots."""
    if not node.level:
        return node.module or ""
    up = node.level - (path.name == "__init__.py")
    parts = module.split(".")
    return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])


def _entered(name: str, importer: str, modules: Mapping[str, Path]) -> list[str]:
    """The modules that an import of this name depends on."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    entered = [name] if name and name != importer else []
    package = name.rpartition(".")[0]
    while package:
        if package in modules and not f"{importer}.".startswith(f"{package}."):
            entered.append(package)
        package = package.rpartition(".")[0]
    return entered


def _components(graph: Mapping[str, Sequence[str]]) -> list[set[str]]:
    """Strongly connected ones, by Kosaraju's algorithm: in the order of the last visits, along the reversed edges."""
    order: list[str] = []
    seen: set[str] = set()
    for root in graph:
        stack = [] if root in seen else [(root, iter(graph[root]))]
        seen.add(root)
        while stack:
            module, targets = stack[-1]
            following = next((target for target in targets if target not in seen), None)
            if following is None:
                order.append(module)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(graph[following])))
    reverse: dict[str, list[str]] = {module: [] for module in graph}
    for source in graph:
        for target in graph[source]:
            reverse[target].append(source)
    components: list[set[str]] = []
    placed: set[str] = set()
    for root in reversed(order):
        component, left = set(), [root]
        while left:
            found = left.pop()
            if found not in placed:
                placed.add(found)
                component.add(found)
                left += reverse[found]
        components.append(component)
    return components
