"""What the policy says of a check, whichever it is."""

from __future__ import annotations

from typing import Annotated

import msgspec

from fireflyer.base.health_event import Severity

__all__ = ["Amount", "CheckSettings", "Name", "Names", "Share"]

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f]*$")]
Names = Annotated[tuple[Name, ...], msgspec.Meta(max_length=256)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e18)]


class CheckSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checks with thresholds add them."""

    enabled: bool = True
    required: bool = False
    """A node of which the check cannot be run is not returned to service, and a person is told."""
    severity: Annotated[dict[Annotated[str, msgspec.Meta(max_length=64)], Severity], msgspec.Meta(max_length=256)] = {}
    """Of findings, by their cause, as `xid_79`; `any`: of all others. Replaces the severity that the check gives."""

    @property
    def is_set(self) -> bool:
        """Whether there is anything to compare with; False: the check is off until the policy gives a threshold."""
        return True
