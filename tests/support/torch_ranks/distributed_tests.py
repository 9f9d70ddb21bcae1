"""Runs torch's own tests of backends (`DistributedTest`), or some of them, with one backend and two ranks.

`python -m tests.support.torch_ranks.distributed_tests BACKEND [TEST...]` prints a line of JSON: test -> outcome.
`2/8` in the place of tests is each eighth one, from the third on: a part of all.
`--compare` in the place of a backend runs them with gloo and with hfreduce, and prints a table of what differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from tests.support.patience import allowed_s

__all__ = ["outcomes_of"]

_MODULE = "tests.support.torch_ranks.distributed_tests"
"""`__name__` is another one where this is the program."""
PASSED = "passed"
RANKS = 2
LIMIT_S = 60
"""Of one test."""


def outcomes_of(backend: str, tests: Sequence[str], *, limit_s: float) -> dict[str, str]:
    """As from the command line, in a process of its own, since torch reads the backend when its tests are imported."""
    ended = subprocess.run(
        [sys.executable, "-m", _MODULE, backend, *tests],
        capture_output=True,
        text=True,
        timeout=allowed_s(limit_s),
        check=False,
    )
    if ended.returncode != 0:
        raise RuntimeError(f"the tests of {backend} did not run: {ended.stderr[-2000:]}")
    found: dict[str, str] = json.loads(ended.stdout.splitlines()[-1])
    return found


class _Outcomes(unittest.TestResult):
    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, str] = {}

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802 - of unittest
        self._add(test, PASSED)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self._add(test, f"skipped: {reason}")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self._add(test, f"failed: {_last_line(err[1])}")

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self._add(test, f"failed: {_last_line(err[1])}")

    def _add(self, test: unittest.TestCase, outcome: str) -> None:
        name = test.id().rsplit(".", 1)[-1]
        self.outcomes[name] = outcome
        print(f"{name}: {outcome}", file=sys.stderr, flush=True)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line]
    return (telling or lines or [type(error).__name__])[-1][:300]


def _chosen(names: Sequence[str], tests: list[str]) -> Sequence[str]:
    if len(tests) != 1 or "/" not in tests[0]:
        return tests or names
    part, parts = map(int, tests[0].split("/"))
    return names[part::parts]


def _run(backend: str, tests: list[str], directory: str) -> dict[str, str]:
    """`directory`: in which ranks meet, of this run alone."""
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(RANKS), "TEMP_DIR": directory}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(LIMIT_S)
    from torch.testing._internal.distributed import distributed_test

    # The tests ask for the name: which are skipped, and what some of them do. All are told gloo, and get `backend`.
    init = dist.init_process_group

    def init_with_backend(*arguments: Any, **options: Any) -> None:
        init(*arguments, **options | {"backend": backend})

    dist.init_process_group = init_with_backend
    base: Any = distributed_test.TestDistBackend
    more: Any = distributed_test.DistributedTest._DistTestBase

    class Forked(base, more):  # type: ignore[misc]
        """Its ranks are forks of this process: a test costs no import of torch."""

        def setUp(self) -> None:
            super().setUp()
            # the one test that compares the name itself
            distributed_test.BACKEND = backend if self._testMethodName == "test_get_backend" else "gloo"
            context: Any = __import__("multiprocessing").get_context("fork")
            self._start_processes(context.Process)

    result = _Outcomes()
    names = _chosen(unittest.TestLoader().getTestCaseNames(Forked), tests)
    unittest.TestSuite(Forked(name) for name in names).run(result)
    return result.outcomes


def _compare(tests: list[str]) -> None:
    gloo = outcomes_of("gloo", tests, limit_s=3600)
    ours = outcomes_of("hfreduce", tests, limit_s=3600)
    passed = [name for name, outcome in gloo.items() if outcome == PASSED]
    print(f"{len(gloo)} tests, {len(passed)} pass with gloo")
    print(f"{sum(ours[name] == PASSED for name in passed)} of them pass with hfreduce; the others:")
    for name in passed:
        if ours[name] != PASSED:
            print(f"{name:60} {ours[name]}")
    print("passed with hfreduce and not with gloo:")
    for name, outcome in ours.items():
        if outcome == PASSED != gloo[name]:
            print(f"{name:60} {gloo[name]}")


if __name__ == "__main__":
    if sys.argv[1] == "--compare":
        _compare(sys.argv[2:])
    else:
        with tempfile.TemporaryDirectory() as directory:
            print(json.dumps(_run(sys.argv[1], sys.argv[2:], directory)), flush=True)
