"""The places on which every test here runs. `place` is compared call by call with a local file system where one can be
had (as root), and always with what the test says itself."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Final

import pytest
from tests.support.fs.clusters.local_cluster import LocalCluster
from tests.support.posix.both import Both
from tests.support.posix.client import ClientPlace
from tests.support.posix.core import CorePlace
from tests.support.posix.local import LocalPlace, local_place
from tests.support.posix.places import ALICE, BOB, CAROL, ROOT, Place, User
from tests.support.posix.real import mounted_place

_tops: Final = itertools.count(1)


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPlace | str]:
    candidates = [str(tmp_path_factory.getbasetemp()), os.getcwd(), "/var/tmp", "/dev/shm"]
    with local_place(candidates) as found:
        yield found


@pytest.fixture(scope="session")
def cluster(whole_session_cluster: LocalCluster) -> LocalCluster:
    """Real processes."""
    return whole_session_cluster


@pytest.fixture(scope="session")
def client(cluster: LocalCluster) -> Iterator[ClientPlace]:
    place = ClientPlace(cluster)
    yield place
    place.close()


@pytest.fixture(scope="session")
def mount(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPlace]:
    with mounted_place(cluster, str(tmp_path_factory.mktemp("mount"))) as place:
        yield place


REAL: Final = [pytest.mark.slow, pytest.mark.processes]


@pytest.fixture(params=["core", pytest.param("client", marks=REAL), pytest.param("mount", marks=REAL)])
def place(request: pytest.FixtureRequest, local: LocalPlace | str) -> Place:
    subject: Place = CorePlace() if request.param == "core" else request.getfixturevalue(request.param)
    found = subject if isinstance(local, str) else Both(local, subject)
    found.renew(f"/top-{next(_tops)}")
    return found


@pytest.fixture
def coherent(request: pytest.FixtureRequest) -> None:
    """For tests of what several users see of each other's open files: between clients that is from close to open."""
    if request.node.callspec.params["place"] == "client":
        pytest.skip("each user is a client of their own")


@pytest.fixture
def relative(request: pytest.FixtureRequest) -> None:
    """For tests of paths as long as a path may be."""
    if request.node.callspec.params["place"] == "client":
        pytest.skip("the library has no working directory, so paths are longer")


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
