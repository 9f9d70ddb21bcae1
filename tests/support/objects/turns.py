"""Threads of which one runs at a time, and a seed says which: interleavings of real code that can be replayed."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

__all__ = ["Turns", "TurnsLock"]


class Turns:
    """`step` is called by the actors wherever another one may go on."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._running: list[int] = []
        self._turn = -1
        self._numbers: dict[int, int] = {}
        self._errors: list[BaseException] = []

    def run(self, actors: Sequence[Callable[[], None]]) -> None:
        """All of them to their ends. Raises the first error of one."""
        threads = [threading.Thread(target=self._act, args=(number, actor)) for number, actor in enumerate(actors)]
        self._running = list(range(len(actors)))
        for thread in threads:
            thread.start()
        with self._changed:
            self._choose()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def step(self) -> None:
        number = self._numbers.get(threading.get_ident())
        if number is not None:
            with self._changed:
                self._choose()
                self._changed.wait_for(lambda: self._turn == number)

    def _act(self, number: int, actor: Callable[[], None]) -> None:
        with self._changed:
            self._numbers[threading.get_ident()] = number
            self._changed.wait_for(lambda: self._turn == number)
        try:
            actor()
        except BaseException as error:
            self._errors.append(error)
        with self._changed:
            del self._numbers[threading.get_ident()]
            self._running.remove(number)
            self._choose()

    def _choose(self) -> None:
        if self._running:
            self._turn = self._random.choice(self._running)
            self._changed.notify_all()


class TurnsLock:
    """A lock for the actors: who waits for it lets others go on."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._held = False

    def __enter__(self) -> Self:
        self._turns.step()
        while self._held:
            self._turns.step()
        self._held = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._held = False
        self._turns.step()
