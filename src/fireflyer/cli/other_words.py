"""What people type who know other tools, by the command of `ff` that does it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

__all__ = ["OTHER_WORDS"]

_WORDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "run": "torchrun launch mpirun srun deepspeed",
        "submit": "sbatch qsub",
        "ps": "squeue qstat tasks jobs queue list",
        "show": "describe inspect info task job sstat",
        "stop": "cancel kill scancel qdel delete",
        "logs": "tail log",
        "history": "sacct",
        "exec": "attach",
        "shell": "ssh salloc interactive",
        "nodes": "sinfo cluster machines",
        "node drain": "drain cordon",
        "node resume": "undrain uncordon",
        "agent join": "join",
        "up": "start init serve platform",
        "user": "users",
        "user token": "token tokens",
        "ckpt": "checkpoint checkpoints",
        "ckpt verify": "verify",
        "ckpt export": "export",
        "data pack": "pack dataset",
        "fs": "3fs storage filesystem",
        "fs put": "put upload",
        "fs get": "get download",
        **{f"fs {name}": name for name in ("mount", "umount", "ls", "cat", "stat", "find", "du", "df", "mkdir", "touch",
                                           "chown", "chmod", "cp", "mv", "rm", "sync", "fsck", "bench")},
        "health": "doctor check checks",
        "soak": "chaos",
        "sim": "simulate simulator",
        "collectives explain": "flight hang explain",
        "train compare": "compare",
        "train schedule": "schedule pipeline",
        "plan network": "network",
        "plan model": "model",
        "manager backup": "backup",
        "manager restore": "restore",
        "time-sharing": "policy preemption",
        "usage": "accounting sreport",
        "--help": "help",
    }
)  # fmt: skip

OTHER_WORDS: Final[Mapping[str, str]] = MappingProxyType(
    {word: command for command, words in _WORDS.items() for word in words.split()}
)
"""What people type, by the command (below `ff`) that does it."""
