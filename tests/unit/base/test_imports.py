"""No module of the product, the tests or the benchmarks imports itself through others."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.module_graph import cycles, imports_of, modules_of

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize(("root", "package"), [("src", "fireflyer"), (".", "tests"), (".", "bench")])
def test_there_are_no_import_cycles(root: str, package: str) -> None:
    modules = modules_of(REPOSITORY / root, package)
    assert len(modules) > 40
    found = cycles(imports_of(modules))
    assert not found, "\n".join(map(str, found))


def cycles_told(root: Path, **sources: str) -> list[str]:
    """Cycles, as they are told, of the modules of a package `p`; `a__b` is p/a/b.py."""
    for name, source in sources.items():
        path = root.joinpath("p", *name.split("__")).with_suffix(".py")
        if name.endswith("init"):
            path = path.with_name("__init__.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return [str(cycle).replace(f"{root}/", "") for cycle in cycles(imports_of(modules_of(root, "p")))]


def test_a_cycle_is_told_with_its_edges_and_nothing_else(tmp_path: Path) -> None:
    assert cycles_told(tmp_path, init="", a="import os\nimport p.b\n", b="from p import c\n", c="from p.a import x\n",
        d="from p.a import x\n") == [
        "import cycle of 3 modules:\n"
        "  p/a.py:2: p.a imports p.b\n"
        "  p/b.py:1: p.b imports p.c\n"
        "  p/c.py:1: p.c imports p.a"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "back",
    [
        "def late():\n    from p.a import x\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.a import x\n",
        "try:\n    pass\nexcept OSError:\n    from p.a import x\n",
        "for x in ():\n    pass\nelse:\n    with x:\n        from p.a import x\n",
        "try:\n    pass\nfinally:\n    match 1:\n        case 1:\n            from p.a import x\n",
        "from .a import x\n",
        "from . import a\n",
        "import p.a.x\n",
        "import importlib\nHOME = 'p.a'\nimportlib.import_module(HOME)\n",
    ],
)
def test_an_import_counts_wherever_it_stands(tmp_path: Path, back: str) -> None:
    (told,) = cycles_told(tmp_path, init="", a="import p.b\n", b=back)
    assert "p.a imports p.b" in told
    assert "p.b imports p.a" in told


def test_a_text_is_no_import_where_nothing_is_imported_by_name(tmp_path: Path) -> None:
    assert not cycles_told(tmp_path, init="", a="import p.b\n", b="COMMAND = ['python', '-m', 'p.a']\n")


def test_a_package_may_list_the_names_of_its_modules_and_they_may_import_each_other(tmp_path: Path) -> None:
    assert not cycles_told(
        tmp_path, init="", a__init="from p.a.b import x\n", a__b="from p.a import c\n", a__c="x = 1\n"
    )


def test_who_enters_a_package_depends_on_its_init(tmp_path: Path) -> None:
    (told,) = cycles_told(tmp_path, init="", a__init="from p.d import x\n", a__b="x = 1\n", d="from p.a.b import x\n")
    assert told.splitlines()[1:] == ["  p/a/__init__.py:1: p.a imports p.d", "  p/d.py:1: p.d imports p.a"]


def test_a_name_of_a_package_that_is_no_module_depends_on_its_init(tmp_path: Path) -> None:
    (told,) = cycles_told(tmp_path, init="", a__init="from p.a.b import x\n", a__b="from p.a import y\n")
    assert told.splitlines()[1:] == ["  p/a/__init__.py:1: p.a imports p.a.b", "  p/a/b.py:1: p.a.b imports p.a"]
