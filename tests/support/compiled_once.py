"""Modules that every worker of pytest needs: each worker compiles its share, and then all read what all have compiled.

pytest compiles test files with its own assertions in them. In a fresh clone that takes 20 s of processor time, and each
worker did it for all files, since all import the same file at the same time; other modules take 4 s.

pytest has no public way to compile a test file without importing it. A version that has none of the private names below
compiles them when it imports them, as every version does where this module has compiled none.
"""

from __future__ import annotations

import compileall
import sys
from collections.abc import Callable
from importlib.util import source_hash
from pathlib import Path
from typing import Final

import pytest

__all__ = ["compile_share"]

_REPOSITORY: Final = next(one for one in Path(__file__).resolve().parents if (one / "pyproject.toml").is_file())


def compile_share(config: pytest.Config, number: int, count: int) -> None:
    """The share of worker `number` of `count`: files that exist already are kept."""
    if sys.dont_write_bytecode:
        return
    rewrite = _rewriter(config)
    tests, sources = ([*(_REPOSITORY / root).rglob("*.py")] for root in ("tests", "src"))
    # The largest first, in turn: all shares take nearly the same time.
    for path in sorted((*tests, *sources), key=lambda path: (-path.stat().st_size, path))[number::count]:
        if path.name == "conftest.py" or (path.name.startswith("test_") and path.is_relative_to(_REPOSITORY / "tests")):
            rewrite(path)
        else:
            compileall.compile_file(path, quiet=2)


def _rewriter(config: pytest.Config) -> Callable[[Path], object]:
    try:
        from _pytest.assertion.rewrite import (
            PYC_TAIL,
            _rewrite_test,
            _write_pyc,
            assertstate_key,
            get_cache_dir,
            try_makedirs,
        )
    except ImportError:
        return lambda path: None

    def rewrite(path: Path) -> None:
        compiled = get_cache_dir(path) / f"{path.stem}{PYC_TAIL}"
        digest = source_hash(path.read_bytes())
        if compiled.is_file() and compiled.read_bytes()[8:16] == digest[:8]:
            return
        if try_makedirs(compiled.parent):
            digest, code = _rewrite_test(path, config)
            _write_pyc(config.stash[assertstate_key], code, digest, compiled)

    return rewrite
