"""The places on which every test here runs. `place` is compared call by call with a local file system where one can be
had (as root), and always with what the test says itself."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Final

import pytest
from tests.support.posix.both import Both
from tests.support.posix.core import CorePlace
from tests.support.posix.local import LocalPlace, local_place
from tests.support.posix.places import ALICE, BOB, CAROL, ROOT, Place, User

_tops: Final = itertools.count(1)


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPlace | str]:
    candidates = [str(tmp_path_factory.getbasetemp()), os.getcwd(), "/var/tmp", "/dev/shm"]
    with local_place(candidates) as found:
        yield found


@pytest.fixture(params=["core"])
def place(request: pytest.FixtureRequest, local: LocalPlace | str) -> Place:
    subject = CorePlace()
    found = subject if isinstance(local, str) else Both(local, subject)
    found.renew(f"/top-{next(_tops)}")
    return found


@pytest.fixture
def root(place: Place) -> User:
    return User(place, ROOT)


@pytest.fixture
def alice(place: Place) -> User:
    return User(place, ALICE)


@pytest.fixture
def bob(place: Place) -> User:
    return User(place, BOB)


@pytest.fixture
def carol(place: Place) -> User:
    return User(place, CAROL)
