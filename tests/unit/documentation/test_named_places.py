"""Files, modules and functions that the documentation names in `code` are in the tree: pages follow what is moved or
renamed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Final

import pytest

ROOT: Final = next(one for one in Path(__file__).resolve().parents if (one / "pyproject.toml").is_file())
PAGES: Final = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FENCE: Final = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE: Final = re.compile(r"`([^`\n]+)`")
SOURCE_SUFFIXES: Final = ("py", "pyi", "cpp", "hpp")
IN_TREE: Final = re.compile(r"(?:src|tests|cpp|bench|docs|scripts)/[\w./-]+")
SOURCE: Final = re.compile(rf"[\w./-]+\.(?:{'|'.join(SOURCE_SUFFIXES)})")
TEST: Final = re.compile(r"[\w/]+/(?:test_\w+|\w+_test)")
DOTTED: Final = re.compile(r"[a-z]\w*(?:\.\w+)+")
WALK_ROW: Final = re.compile(r"^\| `(?P<file>[\w./]+)` \| `(?P<function>\w+)` \|", re.MULTILINE)
PACKAGE: Final = ROOT / "src/fireflyer"
PACKAGES: Final = frozenset(path.name for path in PACKAGE.iterdir() if path.is_dir())
OTHERS: Final = {  # patterns, files of the reader and of other projects
    *("X_test.cpp", "docs/design/NNNN-title.md", "PyProcessGroup.hpp", "prepare.py"),
    *("cluster.json", "data.mdb"),  # files that a service writes
    *("fs.ask", "accounts.find_token"),  # methods of RPC
    "data.node",  # a key of JSON
    "fs.kv",  # planned
}


@cache
def tracked() -> tuple[PurePosixPath, ...]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(PurePosixPath(line) for line in listed.stdout.splitlines())


@cache
def endings() -> frozenset[str]:
    """The last parts of the path of every file and directory of the tree; of sources without the suffix, too."""
    places = set(tracked()) | {parent for path in tracked() for parent in path.parents}
    places |= {path.with_suffix("") for path in tracked() if path.suffix[1:] in SOURCE_SUFFIXES}
    return frozenset("/".join(place.parts[first:]) for place in places for first in range(len(place.parts)))


def named(page: Path) -> Iterator[str]:
    yield from CODE.findall(FENCE.sub("", page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_are_there(page: Path) -> None:
    files = (name for name in named(page) if any(kind.fullmatch(name) for kind in (IN_TREE, SOURCE, TEST)))
    gone = [name for name in files if name.strip("/") not in endings() and name not in OTHERS]
    assert not gone, f"{page.relative_to(ROOT)} names what is not in the tree: {gone}"


def module_of(name: str) -> tuple[Path, str]:
    """The module that a dotted name of ours leads to, and the first part behind it, which the module has to have."""
    place, parts = PACKAGE, name.removeprefix("fireflyer.").split(".")
    for number, part in enumerate(parts):
        if (place / part).is_dir():
            place /= part
        elif (place / f"{part}.py").is_file():
            return place / f"{part}.py", "".join(parts[number + 1 : number + 2])
        else:
            return place / "__init__.py", part
    return place / "__init__.py", ""


def is_there(name: str) -> bool:
    module, behind = module_of(name)
    return not behind or re.search(rf"\b{behind}\b", module.read_text()) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_that_a_page_names_are_there(page: Path) -> None:
    dotted = (name for name in named(page) if DOTTED.fullmatch(name) and name.split(".")[0] in {"fireflyer", *PACKAGES})
    gone = [name for name in dotted if name not in OTHERS and not is_there(name)]
    assert not gone, f"{page.relative_to(ROOT)} names what src/fireflyer does not have: {gone}"


@pytest.mark.parametrize("page", sorted((ROOT / "docs/walks").glob("*.md")), ids=lambda page: page.stem)
def test_functions_of_a_walk_are_in_the_file_beside_them(page: Path) -> None:
    rows = WALK_ROW.findall(page.read_text())
    assert rows
    for file, function in rows:
        found = [path for path in tracked() if f"/{path}".endswith(f"/{file}")]
        assert any(re.search(rf"\b{function}\b", (ROOT / path).read_text()) for path in found), (file, function)


def test_a_name_is_sought_in_the_module_that_it_leads_to() -> None:
    assert is_there("cluster.core.gang")
    assert is_there("fireflyer.checkpoint.TrainingLoop")
    assert not is_there("cluster.core.no_such_module")
    assert not is_there("fireflyer.checkpoint.NoSuchClass")
    assert "core/gang.py" in endings()
    assert "core/no_such_module.py" not in endings()
