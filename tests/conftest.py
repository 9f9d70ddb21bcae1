"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings
from tests.support import processor_time
from tests.support.campaigns.late import CHANGED_LATELY, NOT_BEGUN, patience_s
from tests.support.campaigns.shards import changed_lately, commit_count, expected_s, in_turn, parts
from tests.support.campaigns.slow_files import can_have_slow_tests
from tests.support.compiled_once import compile_share
from tests.support.fs.clusters.local_cluster import shared_cluster, whole_session_cluster
from tests.support.kvstore.postgres import PostgresServer, postgres_programs, running_postgres
from tests.support.patience import allowed_s, notice_stalls
from tests.support.shared_paths import module_path, session_path

__all__ = ["module_path", "session_path", "shared_cluster", "whole_session_cluster"]

TESTS: Final = Path(__file__).parent

# A thread of torch that waits for others lets the processor go. By default it looks again and again: beside others,
# a test of a small model took three times the processor time. It is read once, when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Whoever runs the tests in the background or under nohup may have them ignore these signals, and what they start would
# inherit that: some tests send them to what they start.
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _usual)

notice_stalls()

# How long an example takes is a matter of the machine: benchmarks are for that. The examples of a commit are always the
# same ones, so that what passed here passes there, too; FIREFLYER_TEST_EXAMPLES=new looks for others.
_new = os.environ.get("FIREFLYER_TEST_EXAMPLES") == "new"
settings.register_profile(
    "fireflyer",
    max_examples=200 if _new else 50,
    deadline=None,
    derandomize=not _new,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("fireflyer")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "of the selected campaigns of each kind, with processes and without, run the part of this commit only: at "
    text += "most so much processor time"
    parser.addoption("--rotate-campaigns", type=float, metavar="SECONDS", help=text)
    text = (
        "of the slow tests that are no campaigns, run the files whose turn it is with this commit, one of N parts, and "
    )
    text += "those that a commit of the four hours before it changed"
    parser.addoption("--turns", type=int, metavar="N", help=text)
    text = "begin no slow test after this Unix time; those of files that such a commit changed, 10 minutes later"
    parser.addoption("--begin-before", type=float, metavar="TIME", help=text)
    text = "show which tests and files took most processor time"
    parser.addoption("--processor-time", action="store_true", help=text)
    text = "import only files whose text names the markers of slow tests; for use with -m"
    parser.addoption("--slow-files", action="store_true", help=text)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Each of several workers that run all tests compiles a share of what all import."""
    worker = getattr(session.config, "workerinput", None)
    whole = [Path(session.config.rootpath, name) for name in session.config.args] == [TESTS]
    if worker is not None and whole and not session.config.getoption("--slow-files"):
        compile_share(session.config, int(worker["workerid"].removeprefix("gw")), worker["workercount"])


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collecting makes millions of objects that stay. The collector looks at none of them then or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if is_test and config.getoption("--slow-files") and not can_have_slow_tests(collection_path, TESTS):
        return True
    return None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Every run that imports all files checks what `--slow-files` assumes."""
    if item.get_closest_marker("slow") is not None and not can_have_slow_tests(item.path, TESTS):
        raise pytest.UsageError(f"{item.nodeid} is slow: {item.path.name} must name the marker, for --slow-files")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """The time after which a test counts as hung is stated for a machine with nothing else to do, too."""
    marker = item.get_closest_marker("timeout")
    stated = marker.args[0] if marker is not None else item.config.getoption("timeout") or item.config.getini("timeout")
    item.add_marker(pytest.mark.timeout(allowed_s(float(stated))), append=False)
    processor_time.begin(item)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture, which may start a cluster."""
    before: float | None = item.config.getoption("--begin-before")
    if before is not None and time.time() >= before + patience_s(item, item.config.stash[CHANGED_LATELY]):
        pytest.skip(NOT_BEGUN)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    processor_time.note(item, report)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    late = [one.nodeid for one in terminalreporter.stats.get("skipped", ()) if NOT_BEGUN in str(one.longrepr)]
    if late:
        terminalreporter.section("not begun")
        terminalreporter.write("\n".join((f"{len(late)} slow tests: {NOT_BEGUN}", *late, "")))
    if config.getoption("--processor-time"):
        reports = [
            one for many in terminalreporter.stats.values() for one in many if isinstance(one, pytest.TestReport)
        ]
        terminalreporter.section("processor time")
        terminalreporter.write("\n".join((*processor_time.summary(reports), "")))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out: set[pytest.Item] = set()
    most_s: float | None = config.getoption("--rotate-campaigns")
    if most_s is not None:
        left_out |= _campaigns_of_other_commits(items, most_s)
    turns: int | None = config.getoption("--turns")
    config.stash[CHANGED_LATELY] = changed_lately(hours=4)
    if turns is not None:
        left_out |= _slow_tests_of_other_commits(items, turns, config.stash[CHANGED_LATELY])
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _campaigns_of_other_commits(items: list[pytest.Item], most_s: float) -> set[pytest.Item]:
    campaigns = [item for item in items if item.get_closest_marker("campaign") is not None]
    left_out, number = set(campaigns), commit_count()
    for with_processes in (True, False):  # each in turn: there is far more to compute than there is to start
        kind = [item for item in campaigns if (item.get_closest_marker("processes") is not None) is with_processes]
        found = parts([expected_s(item) for item in kind], most_s)
        left_out -= {kind[position] for position in found[number % len(found)]} if found else set()
    return left_out


def _slow_tests_of_other_commits(items: list[pytest.Item], turns: int, changed: frozenset[str]) -> set[pytest.Item]:
    number = commit_count()
    paths = {path: path.relative_to(TESTS.parent).as_posix() for path in {item.path for item in items}}
    others = {path for path, name in paths.items() if name not in changed and not in_turn(name, number, turns)}
    return {
        item
        for item in items
        if item.path in others
        and item.get_closest_marker("slow") is not None
        and item.get_closest_marker("campaign") is None
    }


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One for all tests, which take tables of their own in it; not durable."""
    programs = postgres_programs()
    if programs is None:
        pytest.skip("no PostgreSQL on this machine; install the package postgresql")
    with running_postgres(programs) as server:
        yield server


@pytest.fixture
def postgres_url(request: pytest.FixtureRequest) -> str:
    """Of an empty table: on the server that FIREFLYER_TEST_POSTGRES names (a URL), or on one of our own."""
    given = os.environ.get("FIREFLYER_TEST_POSTGRES")
    if given is not None:
        return f"{given}{'&' if '?' in given else '?'}table=test_{secrets.token_hex(8)}"
    server: PostgresServer = request.getfixturevalue("postgres_server")
    return server.url()
