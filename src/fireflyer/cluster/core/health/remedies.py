"""Which remedy a cause has, as data: arXiv:2408.14158, table V, for GPUs; links, memory and disks as sites do it.

A ladder of remedies: the first is for the first fault of a part, and each further fault of the same part, within the
policy's time, takes the next one. The last one is repeated.
"""

from __future__ import annotations

import enum
from typing import Final

from fireflyer.base.xids import TABLE_V, XidClass
from fireflyer.cluster.core.health.findings import Finding

__all__ = ["LADDERS", "Remedy", "ladder_of", "remedy_of"]


class Remedy(enum.Enum):
    TEST = "test"
    """Nothing is repaired: the checks are repeated, under load where the site's validation does that."""
    RESET = "reset"
    """Of the GPU, or of the link."""
    REBOOT = "reboot"
    FIELD_DIAGNOSIS = "field diagnosis"
    """The vendor's diagnosis of the part, with the node out of service."""
    RMA = "rma"
    """The part is returned to its vendor and replaced."""


_SOFTWARE: Final = (Remedy.TEST, Remedy.RESET, Remedy.FIELD_DIAGNOSIS, Remedy.RMA)
_NVLINK: Final = (Remedy.TEST, Remedy.TEST, Remedy.FIELD_DIAGNOSIS, Remedy.RMA)
_ECC: Final = (Remedy.RESET, Remedy.REBOOT, Remedy.FIELD_DIAGNOSIS, Remedy.RMA)
_UNCORRECTABLE: Final = (Remedy.RESET, Remedy.REBOOT, Remedy.FIELD_DIAGNOSIS, Remedy.RMA)
_FIRMWARE: Final = (Remedy.FIELD_DIAGNOSIS, Remedy.RMA)
_LOST: Final = (Remedy.REBOOT, Remedy.FIELD_DIAGNOSIS, Remedy.RMA)
_SLOW: Final = (Remedy.REBOOT, Remedy.FIELD_DIAGNOSIS, Remedy.RMA)
_WRONG: Final = (Remedy.FIELD_DIAGNOSIS, Remedy.RMA)
_OTHER: Final = (Remedy.TEST, Remedy.REBOOT, Remedy.FIELD_DIAGNOSIS, Remedy.RMA)
_LADDER_OF_CLASS: Final[dict[XidClass, tuple[Remedy, ...]]] = {
    "software": _SOFTWARE, "nvlink": _NVLINK, "memory": _ECC, "uncorrectable": _UNCORRECTABLE, "gsp": _FIRMWARE,
}  # fmt: skip

LADDERS: Final[dict[str, tuple[Remedy, ...]]] = {
    **{f"xid_{number}": ladder for kind, ladder in _LADDER_OF_CLASS.items() for number in TABLE_V[kind]},
    "xid_79": _LOST,
    "fewer_gpus": _LOST,
    **dict.fromkeys(("wrong_result", "wrong_word", "wrong_byte", "wrong_block", "corruption"), _WRONG),
}
"""By cause. Table V names reset or reboot for Xid 79, too; the GPU has left the bus, so a reset does not reach it.
Wrong results are of validators, under load: a test says nothing new of them. Fewer GPUs than before are
seen by validators, too."""


def ladder_of(event: Finding) -> tuple[Remedy, ...]:
    """A cause that is a rate is a figure of a validator, below that of the peers: a test, too, has been done."""
    return LADDERS.get(event.cause, _SLOW if event.cause.endswith("_per_s") else _OTHER)


def remedy_of(event: Finding, faults: int) -> Remedy:
    """For a part that failed `faults` times, this one included."""
    ladder = ladder_of(event)
    return ladder[min(max(faults, 1), len(ladder)) - 1]
