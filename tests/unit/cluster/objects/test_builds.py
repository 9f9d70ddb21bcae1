"""Whose fault a build is that failed, by what pip and uv print."""

from __future__ import annotations

import pytest

from fireflyer.cluster.core.objects.builds import build_failure

HASHES = (
    "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have updated the versions,",
    "six from https://files.example/six-1.17.0.whl:",
    "Expected sha256 0000",
    "Got        4721",
)
NO_PACKAGE = (
    "ERROR: Could not find a version that satisfies the requirement nosuch==1.0 (from versions: none)",
    "ERROR: No matching distribution found for nosuch==1.0",
)
NO_INDEX = (
    "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(': Failed to establish a new "
    "connection: [Errno 111] Connection refused')': /simple/six/",
    *NO_PACKAGE,
)


@pytest.mark.parametrize(
    ("lines", "code", "of_user", "said"),
    [
        (HASHES, 1, True, "DO NOT MATCH THE HASHES"),
        (NO_PACKAGE, 1, True, "No matching distribution found for nosuch"),
        (NO_INDEX, 1, False, "Connection refused"),
        (("noise", "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"), 1, False,
         "No space left on device"),
        (("error: Failed to fetch: `https://x/`", "Caused by: dns error: failed to lookup address"), 2, False,
         "dns error"),
        (("ERROR: HTTP error 503 while getting https://x/six.whl",), 1, False, "503"),
        (("ERROR: HTTP error 404 while getting https://x/six.whl",), 1, True, "404"),
        (("python: No such file or directory",), 127, False, "No such file"),
        ((), -9, False, "killed by signal 9"),
        ((), 1, True, "it said nothing"),
    ],
)  # fmt: skip
def test_what_only_the_node_can_be_the_reason_of_is_told_from_a_bad_lock(
    lines: tuple[str, ...], code: int, of_user: bool, said: str
) -> None:
    failure = build_failure("requirements.txt", code, lines)
    assert failure.of_user == of_user, failure
    assert said in failure.text
    assert "noise" not in failure.text


def test_what_is_quoted_has_a_bound() -> None:
    assert len(build_failure("requirements.txt", 1, ["x" * 500] * 20).text) < 800
