"""Errors of files are what Python's own are."""

from __future__ import annotations

import errno
import pickle

import pytest

from fireflyer.fs.schema.errors import FileError, file_error

KINDS = {
    errno.ENOENT: FileNotFoundError,
    errno.EEXIST: FileExistsError,
    errno.ENOTDIR: NotADirectoryError,
    errno.EISDIR: IsADirectoryError,
    errno.EACCES: PermissionError,
    errno.EAGAIN: BlockingIOError,
    errno.ETIMEDOUT: TimeoutError,
    errno.EINTR: InterruptedError,
    errno.EDQUOT: OSError,
}


@pytest.mark.parametrize(("number", "kind"), KINDS.items())
def test_they_have_kind_number_and_paths_and_keep_them_in_a_pickle(number: int, kind: type[OSError]) -> None:
    error = pickle.loads(pickle.dumps(file_error(number, "", "/a", "/b")))
    assert isinstance(error, FileError)
    assert isinstance(error, kind)
    assert (error.errno, error.filename, error.filename2) == (number, "/a", "/b")
    assert str(error).endswith(": '/a' -> '/b'")


@pytest.mark.parametrize("number", [number for number, kind in KINDS.items() if kind is not OSError])
def test_they_are_made_anew_of_type_and_text_alone(number: int) -> None:
    """As a data loader does with an error of a worker; it was a `RuntimeError` of which nobody could tell the kind."""
    error = type(file_error(number))("Caught in worker 0")
    assert error.errno == number
    assert str(error) == f"[Errno {number}] Caught in worker 0"
