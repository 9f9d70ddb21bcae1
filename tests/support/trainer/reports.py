"""What ranks report of their steps where no launcher listens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from fireflyer.base.events import StepReport, decode_log

__all__ = ["reported_tokens"]


def reported_tokens(run_dir: Path) -> dict[int, int]:
    """Tokens of each step, added over the ranks whose FF_RUN_DIR it was."""
    tokens: Counter[int] = Counter()
    for path in run_dir.rglob("*.jsonl"):
        for entry in decode_log(path.read_bytes().splitlines(keepends=True)):
            if isinstance(entry.event, StepReport):
                tokens[entry.event.step] += entry.event.tokens
    return dict(tokens)
