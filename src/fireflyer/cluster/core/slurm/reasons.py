"""The reasons that `squeue` gives, in words."""

from __future__ import annotations

from typing import Final

__all__ = ["reason_words"]

_WORDS: Final = {
    "Resources": "no nodes are free for it yet",
    "Priority": "jobs of a higher priority are before it",
    "Dependency": "it waits for the end of another job",
    "JobHeldUser": "it is held (`scontrol release` lets it go on)",
    "JobHeldAdmin": "an administrator holds it",
    "BeginTime": "its time to begin has not come",
    "Reservation": "it waits for its reservation",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition takes no jobs",
    "PartitionNodeLimit": "it asks for more nodes than the partition has or allows",
    "PartitionTimeLimit": "it asks for more time than the partition allows",
    "BadConstraints": "no nodes have what it asks for",
    "NodeDown": "a node that it needs is down",
    "Licenses": "it waits for a licence",
    "None": "Slurm has not looked at it yet",
}
_LIMITS: Final = ("QOS", "Assoc", "MaxJobs", "MaxSubmit", "MaxNode", "Grp")


def reason_words(reason: str) -> str:
    """Slurm's word stays in it: administrators look for that."""
    word = reason.partition(",")[0].strip()
    words = _WORDS.get(word)
    if words is None and word.startswith(_LIMITS):
        words = "a limit of the site is reached"
    return f"{words} ({reason})" if words else reason or "Slurm gives no reason"
