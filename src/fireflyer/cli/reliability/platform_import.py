"""The history of a platform into the tables: what is new since the import before, in pages."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from fireflyer.analytics.reliability.importing import Imported, import_rows
from fireflyer.analytics.reliability.local_times import Clock
from fireflyer.analytics.reliability.platform_progress import Until, read_progress, write_progress
from fireflyer.base.errors import DataCorruption
from fireflyer.cli.reliability.platform_rows import attempt_of, events_of

if TYPE_CHECKING:
    from fireflyer.cluster.client import Client
    from fireflyer.cluster.core.platform.history_pages import NodeEntry, RunEntry

__all__ = ["import_platform"]

_PIECE_PAGES: Final = 100
"""Of one table: each table is compared with all before it, and what is in none is read again after a kill."""


class _Entry(Protocol):
    @property
    def change(self) -> int: ...


E = TypeVar("E", bound=_Entry)
C = TypeVar("C", bound=_Entry, covariant=True)


class _Page(Protocol[C]):
    @property
    def entries(self) -> tuple[C, ...]: ...

    @property
    def more(self) -> bool: ...


def import_platform(client: Client, directory: str, *, clock: Clock) -> list[Imported]:
    """Attempts, then events, of each word that the cluster has had: a restored store begins another one. What it
    has come to is written with each table that is in place: where it is killed, the next one goes on from there.
    Raises `UsageError` where the directory has the history of another platform."""
    words = client.run_page(limit=1).clusters
    known = read_progress(directory, words)
    # of nodes that are there now
    gpus_of = {node.name: len(node.inventory.gpus) for node in client.all_nodes() if node.inventory is not None}
    found = []
    for word in words:
        until = known.get(word, Until())
        path = f"{client.manager.url} ({word})"
        runs, nodes = _runs(client, word, until.runs), _nodes(client, word, until.nodes)
        pieces = []
        while runs.more:
            attempts = ([attempt_of(one, gpus_of, clock) for one in page] for page in runs.piece())
            pieces.append(import_rows("platform", path, "jobs", attempts, directory))
            known[word] = Until(runs=runs.since, nodes=nodes.since)
            write_progress(directory, known)
        found.append(_sum_of(pieces))
        pieces = []
        while nodes.more:
            events = ([row for one in page for row in events_of(one, clock)] for page in nodes.piece())
            pieces.append(import_rows("platform", path, "events", events, directory))
            known[word] = Until(runs=runs.since, nodes=nodes.since)
            write_progress(directory, known)
        found.append(_sum_of(pieces))
    return found


def _sum_of(pieces: list[Imported]) -> Imported:
    rejected: Counter[str] = Counter()
    for piece in pieces:
        rejected.update(piece.rejected)
    return Imported(
        source=pieces[0].source, path=pieces[0].path, lines=sum(one.lines for one in pieces),
        jobs=sum(one.jobs for one in pieces), events=sum(one.events for one in pieces),
        known=sum(one.known for one in pieces), rejected=dict(rejected),
    )  # fmt: skip


def _runs(client: Client, word: str, since: int) -> _Changes[RunEntry]:
    return _Changes(lambda change: client.run_page(cluster=word, since=change), since)


def _nodes(client: Client, word: str, since: int) -> _Changes[NodeEntry]:
    return _Changes(lambda change: client.node_page(cluster=word, since=change), since)


class _Changes(Generic[E]):
    """Pages of entries from a change on; `since` is the one from which the next import goes on."""

    def __init__(self, page_from: Callable[[int], _Page[E]], since: int) -> None:
        self._page_from, self.since = page_from, since
        self.more = True
        """Perhaps; False: the last page was taken."""

    def piece(self) -> Iterator[tuple[E, ...]]:
        """The next pages, at most `_PIECE_PAGES`."""
        for _ in range(_PIECE_PAGES):
            page = self._page_from(self.since)
            changes = [entry.change for entry in page.entries]
            in_order = all(a < b for a, b in itertools.pairwise([self.since - 1, *changes]))
            if not in_order or (page.more and not changes):
                raise DataCorruption("the manager answered with changes out of their order; ask who runs it")
            if changes:
                yield page.entries
                self.since = changes[-1] + 1
            if not page.more:
                self.more = False
                return
