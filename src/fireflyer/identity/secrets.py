"""The node secret: 32 random bytes that all nodes of one cluster (or all processes of one job) share.

Who holds it is trusted as a node. It never crosses the network; both sides of a connection prove that they hold it
(`fireflyer.identity.handshake`). At rest it is a file of exactly 32 bytes that only its owner can read.
"""

from __future__ import annotations

import hmac
import secrets

from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.identity.private_files import read_private_file, write_private_file

__all__ = ["SECRET_BYTES", "Secret", "load_secret", "new_secret", "save_secret"]

SECRET_BYTES = 32
_MAX_FILE_BYTES = 4096
"""More is not read of a file that is no secret."""


class Secret:
    """32 secret bytes. `repr`, `str` and formatting hide them; comparison takes the same time wherever they differ."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        if len(value) != SECRET_BYTES:
            raise UsageError(f"a node secret has {SECRET_BYTES} bytes, not {len(value)}")
        self._value = bytes(value)

    def reveal(self) -> bytes:
        """The bytes themselves, for deriving keys. Never log, never send."""
        return self._value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._value, other._value)

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return "Secret(hidden)"

    def __reduce__(self) -> str | tuple[object, ...]:
        raise UsageError("a secret cannot be pickled; save it with save_secret and load it on the other side")


def new_secret() -> Secret:
    """A fresh secret from the operating system's generator."""
    return Secret(secrets.token_bytes(SECRET_BYTES))


def load_secret(path: str) -> Secret:
    """Raises `NotFound`, `PermissionDenied` when other users could read it, `DataCorruption` on a wrong length."""
    data = read_private_file(path, _MAX_FILE_BYTES)
    if len(data) != SECRET_BYTES:
        raise DataCorruption(
            f"{path} is not a node secret: it has {len(data)} bytes, not {SECRET_BYTES}; copy it again from its "
            f"source, or make one: (umask 077; head -c {SECRET_BYTES} /dev/urandom > {path})"
        )
    return Secret(data)


def save_secret(secret: Secret, path: str) -> None:
    """Writes `path` with mode 0600, replacing it atomically and durably. Raises `NotFound`, `NoSpace`."""
    write_private_file(path, secret.reveal())
