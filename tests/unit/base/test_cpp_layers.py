"""The C++ libraries include downwards only, and nobody includes what another library keeps to itself.

The table is read from the calls of `ff_library` in cpp/CMakeLists.txt, so that it is what is linked, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

CPP = Path(__file__).parents[3] / "cpp"
PUBLIC = "fireflyer/"

INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)
LIBRARY = re.compile(r"^ff_library\(([^)]+)\)", re.MULTILINE)

Layers = Mapping[str, frozenset[str]]
Files = Mapping[str, str]


def layers() -> dict[str, frozenset[str]]:
    """The folders under cpp/src, and those that each may include."""
    table = {"fuse": frozenset[str]()}
    for call in LIBRARY.findall((CPP / "CMakeLists.txt").read_text()):
        folder, *below = call.split()
        table[folder] = frozenset(below)
    # A module of its own, loaded at run time: it sees what a fabric is, and links nothing.
    table["collectives/transport/ucx"] = frozenset({"collectives/transport"})
    return table


def sources() -> dict[str, str]:
    """Texts by path below cpp/, of the libraries alone: bindings and tests may include any of them."""
    found = {}
    for top in ("src", "include"):
        for path in sorted((CPP / top).rglob("*.[ch]pp")):
            found[path.relative_to(CPP).as_posix()] = path.read_text()
    return found


def folder_of(path: str) -> str:
    return os.path.dirname(path.removeprefix("include/fireflyer/").removeprefix("src/"))


def wrong_includes(files: Files, table: Layers) -> Iterator[str]:
    for path, text in files.items():
        folder = folder_of(path)
        if folder not in table:
            yield f"{path} is in no library"
            continue
        for included in INCLUDE.findall(text):
            if included.startswith(PUBLIC):
                target = folder_of("include/" + included)
                if "include/" + included not in files:
                    yield f"{path} includes {included}, which is not there"
                elif target != folder and target not in table[folder]:
                    yield f"{path} includes {included}: {folder} may not use {target}"
            elif included.endswith(".hpp") and (f"src/{folder}/{included}" not in files or path.startswith("include/")):
                yield f"{path} includes {included}, which is not of {folder}, or private"


def test_libraries_include_downwards_only() -> None:
    files = sources()
    assert len(files) > 100
    assert list(wrong_includes(files, layers())) == []


def test_the_table_has_no_cycle() -> None:
    table = layers()
    left = dict(table)
    while left:
        lowest = [folder for folder, below in left.items() if not below & left.keys()]
        assert lowest, f"these include each other: {sorted(left)}"
        for folder in lowest:
            del left[folder]
    assert all(below <= table.keys() for below in table.values())


def test_each_folder_with_tests_is_built() -> None:
    """CMake looks for `*_test.cpp` in the folders that `ff_tests` names, and nowhere else."""
    built = set(re.findall(r"^  ff_tests\((\S+) ", (CPP / "CMakeLists.txt").read_text(), re.MULTILINE))
    folders = {path.parent.relative_to(CPP / "tests").as_posix() for path in (CPP / "tests").rglob("*_test.cpp")}
    assert len(folders) > 5
    assert folders == built


def test_a_wrong_include_is_found() -> None:
    table = {"base": frozenset[str](), "engine": frozenset({"base"}), "server": frozenset({"base", "engine"})}
    files = {
        "include/fireflyer/base/clock.hpp": "",
        "include/fireflyer/engine/engine.hpp": "",
        "include/fireflyer/server/server.hpp": '#include "secret.hpp"\n',
        "src/base/clock.cpp": '#include "fireflyer/engine/engine.hpp"\n',
        "src/engine/engine.cpp": '#include <fireflyer/server/server.hpp>\n#include "fireflyer/base/clock.hpp"\n',
        "src/engine/flush.cpp": '#include "../server/link.hpp"\n#include "fireflyer/base/gone.hpp"\n',
        "src/server/link.hpp": "",
        "src/server/secret.hpp": "",
        "src/elsewhere/lost.cpp": "",
    }
    assert list(wrong_includes(files, table)) == [
        "include/fireflyer/server/server.hpp includes secret.hpp, which is not of server, or private",
        "src/base/clock.cpp includes fireflyer/engine/engine.hpp: base may not use engine",
        "src/engine/engine.cpp includes fireflyer/server/server.hpp: engine may not use server",
        "src/engine/flush.cpp includes ../server/link.hpp, which is not of engine, or private",
        "src/engine/flush.cpp includes fireflyer/base/gone.hpp, which is not there",
        "src/elsewhere/lost.cpp is in no library",
    ]
