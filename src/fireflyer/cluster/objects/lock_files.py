"""Lock files of Python environments, as users give them."""

from __future__ import annotations

import os
from typing import Final, Literal, NamedTuple, Self

from fireflyer.base.errors import UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.cluster.core.objects.uv_lock import requirements_of

__all__ = ["MAX_LOCK_BYTES", "LockFile", "LockKind"]

LockKind = Literal["requirements.txt", "pylock.toml", "uv.lock"]
MAX_LOCK_BYTES: Final = 4 << 20


class LockFile(NamedTuple):
    kind: LockKind
    data: bytes
    whole: bool = False
    """It names all that is to be installed: no dependencies are looked for."""

    @property
    def title(self) -> str:
        """Title for people."""
        return "uv.lock" if self.whole else self.kind

    @classmethod
    def read(cls, path: str) -> Self:
        """Raises `UsageError`, `NotFound`."""
        kind = cls.kind_of(path)
        try:
            with open(path, "rb") as file:
                data = file.read(MAX_LOCK_BYTES + 1)
        except OSError as error:
            raise translate_os_error(error, f"read {path}") from error
        if len(data) > MAX_LOCK_BYTES:
            raise UsageError(f"{path} is longer than {MAX_LOCK_BYTES} bytes, so it is no lock file")
        return cls(kind, data)

    @staticmethod
    def kind_of(path: str) -> LockKind:
        """Kind of a lock file, by its name. Raises `UsageError`."""
        name = os.path.basename(path)
        if name.startswith("pylock.") and name.endswith(".toml"):
            return "pylock.toml"
        if name == "uv.lock" or name.endswith(".py.lock"):  # of a project, of a script
            return "uv.lock"
        if name.endswith((".txt", ".lock")):
            return "requirements.txt"
        raise UsageError(f"{path} is no lock file; give a requirements file (.txt, .lock), uv.lock or pylock.toml")

    def installable(self) -> LockFile:
        """Lock file as pip and uv install it into an environment that is there already. Raises `UsageError`."""
        if self.kind != "uv.lock":
            return self
        return LockFile("requirements.txt", requirements_of(self.data), whole=True)

    def check_hashes(self) -> None:
        """A lock without hashes would be another environment on each node. Raises `UsageError`."""
        if self.kind == "uv.lock":
            requirements_of(self.data)
        if self.kind == "requirements.txt" and b"--hash=" not in self.data:
            raise UsageError(
                "the lock file has no hashes, so nodes would install what the index has today; make it with "
                "`pip-compile --generate-hashes` or `uv pip compile --generate-hashes`"
            )
