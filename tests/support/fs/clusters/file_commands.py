"""`ff fs` on files, with a directory of this machine in the place of a cluster."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fireflyer.cli import main
from fireflyer.cli.fs import connect
from fireflyer.cli.fs.connect import ClusterTarget
from fireflyer.cli.fs.files import common
from fireflyer.fs.tools.trees import LocalTree
from fireflyer.identity import UserCredential

__all__ = ["Shell", "content_of", "shell_over"]


class Shell:
    def __init__(self, root: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
        self.root = root
        self._captured = capfdbinary

    def __call__(self, *words: str, code: int = 0) -> str:
        """What `ff fs ...` printed on standard output; on standard error where it fails, as `code` says."""
        self._captured.readouterr()
        found = main(["fs", *words])
        out, err = self._captured.readouterr()
        assert found == code, (found, out, err)
        return os.fsdecode(err if code else out).replace(str(self.root), "")

    def lines(self, *words: str) -> list[str]:
        return self(*words).splitlines()


def shell_over(root: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Shell:
    root.mkdir()
    monkeypatch.setattr(common, "connect", lambda where: LocalTree(str(root)))
    monkeypatch.setattr(connect, "local", lambda directory: ClusterTarget((), UserCredential("none"), directory))
    return Shell(root, capfdbinary)


def content_of(root: Path) -> dict[str, bytes | str | None]:
    """Of files the bytes, of links the target, of directories None."""
    found: dict[str, bytes | str | None] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = None if path.is_dir() else path.read_bytes()
    return found
