"""Names inside a checkpoint directory, and what each name means.

    job.json                                     the job's plan, written once
    step-00000120/                               a committed checkpoint: complete, or damaged later
    step-00000120.2/                             the same step saved again after the first was damaged
    step-00000120.pinned                         an empty file: no job removes step-00000120
      manifest.json                              written last, says what a complete checkpoint holds
      shard-00000-of-00004.safetensors           one per rank
    .writer-00000004-00003-…/                    of the attempt that may change this directory, see `fence`
      .tmp-step-00000120-00003-000007-9f86d081/  save 7 of attempt 3 is writing it; never restored from
      .trash-…/                                  on its way out; never restored from

A directory becomes `step-…` by one rename when all in it is durable, and stops being one by one rename before anything
in it is removed. So a `step-…` name always stands for a whole checkpoint, whatever crashes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from fireflyer.checkpoint.core.fence import parse_writer

__all__ = [
    "JOB_FILE",
    "MANIFEST_FILE",
    "MAX_RANKS",
    "MAX_STEP",
    "Candidate",
    "candidates",
    "final_name",
    "is_leftover",
    "is_pinned",
    "is_temporary",
    "parse_final",
    "pin_name",
    "shard_name",
    "temporary_name",
    "trash_name",
]

JOB_FILE = "job.json"
MANIFEST_FILE = "manifest.json"
MAX_STEP = 10**12
MAX_RANKS = 100_000

_FINAL = re.compile(r"step-([0-9]{8,13})(?:\.([1-9][0-9]{0,5}))?")

_TEMPORARY = re.compile(r"\.tmp-step-[0-9]{8,13}-[0-9]{5,10}-[0-9]{6,10}(-[0-9a-f]{1,16})?")


class Candidate(msgspec.Struct, frozen=True, order=True):
    """A name that claims to be a committed checkpoint. Orders by step, then by revision."""

    step: int
    revision: int
    name: str


def shard_name(rank: int, world_size: int) -> str:
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


def temporary_name(step: int, attempt: int, sequence: int, writer: str = "") -> str:
    """`writer`, up to 16 hexadecimal digits, tells apart processes that count attempts and saves alike: of two jobs in
    one directory, or of a launch that is not quite dead and the next one."""
    return f".tmp-step-{step:08d}-{attempt:05d}-{sequence:06d}" + (f"-{writer}" if writer else "")


def is_temporary(path: str) -> bool:
    """Whether `path` is one that `temporary_name` gives, in the directory of a writer."""
    writer, _, name = path.rpartition("/")
    return _TEMPORARY.fullmatch(name) is not None and (not writer or parse_writer(writer) is not None)


def trash_name(name: str, existing: list[str]) -> str:
    """Where to move `name` before removing it: a name that is not taken."""
    if name.startswith(".trash-") and name not in existing:
        return name
    number = 0
    while (trash := f".trash-{name.removeprefix('.')}-{number}") in existing:
        number += 1
    return trash


def is_leftover(name: str) -> bool:
    return name.startswith((".tmp-", ".trash-"))


def pin_name(name: str) -> str:
    """Of the file that keeps the checkpoint `name` from being removed."""
    return f"{name}.pinned"


def is_pinned(name: str, names: Iterable[str]) -> bool:
    return pin_name(name) in names


def parse_final(name: str) -> Candidate | None:
    """What `name` claims to be; None for what is no name of a committed checkpoint."""
    found = candidates([name])
    return found[0] if found else None


def candidates(names: list[str]) -> list[Candidate]:
    """What among `names` claims to be committed, newest first."""
    found: list[Candidate] = []
    for name in names:
        match = _FINAL.fullmatch(name)
        if match is not None and int(match[1]) <= MAX_STEP and name == _final(int(match[1]), int(match[2] or 1)):
            found.append(Candidate(int(match[1]), int(match[2] or 1), name))
    return sorted(found, reverse=True)


def _final(step: int, revision: int) -> str:
    return f"step-{step:08d}" if revision == 1 else f"step-{step:08d}.{revision}"


def final_name(step: int, names: list[str]) -> str:
    """The name to commit `step` under: never one that exists, and above every other of the same step."""
    taken = [candidate.revision for candidate in candidates(names) if candidate.step == step]
    return _final(step, max(taken, default=0) + 1)
