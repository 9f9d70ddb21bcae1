"""The ports that the listeners of a job may use, as a firewall lets them through."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from fireflyer.base.errors import UsageError

__all__ = ["PortRange"]

_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_TEXT = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")


class PortRange(msgspec.Struct, frozen=True):
    """Both ends belong to it; `str()` gives what `parse` takes."""

    first: _Port
    last: _Port

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.last <= 65535:
            raise UsageError(
                f"port range {self.first}-{self.last} is not understood; write the lowest and the highest port, both "
                "from 1 to 65535, like 29500-29599"
            )

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    def __contains__(self, port: object) -> bool:
        return isinstance(port, int) and self.first <= port <= self.last

    @property
    def ports(self) -> range:
        return range(self.first, self.last + 1)

    @classmethod
    def parse(cls, text: str) -> PortRange:
        """Raises `UsageError`.

        >>> PortRange.parse("29500-29599").ports
        range(29500, 29600)
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise UsageError(
                f"port range {text[:40]!r} is not understood; write the lowest and the highest port, like 29500-29599"
            )
        return cls(int(match[1]), int(match[2]))
