"""What a meta service counts of its requests."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Sequence

from fireflyer.fs.schema.meta import Answer, Call, ErrorReply
from fireflyer.runtime.metrics import Series

__all__ = ["MetaMetrics", "label_of"]


class MetaMetrics:
    def __init__(self) -> None:
        self._requests: Counter[type] = Counter()
        self._refusals: Counter[str] = Counter()

    def answered(self, calls: Sequence[Call], answers: Sequence[Answer | None]) -> None:
        for call in calls:
            self._requests[type(call.request)] += 1
        for answer in answers:
            if type(answer) is ErrorReply:
                self._refusals[errno.errorcode.get(answer.errno, answer.code or str(answer.errno))] += 1

    def series(self) -> list[Series]:
        requests = [({"request": label_of(kind)}, float(count)) for kind, count in self._requests.items()]
        refusals = [({"reason": reason}, float(count)) for reason, count in self._refusals.items()]
        return [
            Series("fireflyer_meta_requests_total", "counter", "Requests answered", requests),
            Series("fireflyer_meta_refusals_total", "counter", "Requests refused, by errno or error code", refusals),
        ]


def label_of(kind: type) -> str:
    """Of a class of requests. One that is renamed keeps its label as `label: ClassVar[str]`."""
    found: str = getattr(kind, "label", kind.__name__)
    return found
