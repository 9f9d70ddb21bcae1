"""Directories of fixtures that several tests share. pytest keeps such ones until its process ends, and all of them when
one test has failed; a cluster of processes takes a gibibyte.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["module_path", "session_path"]


@pytest.fixture(scope="module")
def module_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """For the tests of a module together what `tmp_path` is for one: it is gone after them, unless one has failed."""
    with _gone_when_passed(request.session, tmp_path_factory) as path:
        yield path


@pytest.fixture(scope="session")
def session_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same for all tests of this process."""
    with _gone_when_passed(request.session, tmp_path_factory) as path:
        yield path


@contextlib.contextmanager
def _gone_when_passed(session: pytest.Session, factory: pytest.TempPathFactory) -> Iterator[Path]:
    path, failed = factory.mktemp("shared"), session.testsfailed
    yield path
    if session.testsfailed == failed:
        shutil.rmtree(path, ignore_errors=True)
