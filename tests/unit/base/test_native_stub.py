"""The committed stub names what the extension has, no more and no less."""

import ast
from importlib import import_module, resources
from pathlib import Path

from fireflyer import native

EXTENSION = import_module("fireflyer.native._core")


def stub_names() -> set[str]:
    tree = ast.parse(resources.files("fireflyer.native").joinpath("_core.pyi").read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


def test_stub_and_module_have_the_same_names() -> None:
    assert stub_names() == {name for name in vars(EXTENSION) if not name.startswith("_")}


def test_package_exports_are_those_of_the_extension() -> None:
    own = {"ucx_module"}  # a path, which no extension is needed for
    for name in set(native.__all__) - own:
        assert getattr(native, name) is getattr(EXTENSION, name)


def test_nobody_else_imports_the_extension_itself() -> None:
    package = resources.files("fireflyer").joinpath("__init__.py")
    sources = sorted(Path(str(package)).parent.rglob("*.py"))
    guilty = [str(path) for path in sources if "native._core" in path.read_text() and path.parent.name != "native"]
    assert len(sources) > 50
    assert guilty == []
