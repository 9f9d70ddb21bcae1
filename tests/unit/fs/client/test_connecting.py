"""What `fireflyer.fs.connect` is given, and where its clients may not go."""

from __future__ import annotations

import pickle

import pytest

from fireflyer.base.errors import UsageError
from fireflyer.fs.client.connecting import parse
from fireflyer.fs.client.files.asyncio_files import Files
from fireflyer.fs.client.files.file_objects import OpenFile
from fireflyer.fs.client.files.file_system import FileSystem
from fireflyer.fs.schema.errors import file_error
from fireflyer.fs.tools import connections
from fireflyer.fs.tools.default_cluster import TARGET_VARIABLE, TOKEN_FILE_VARIABLE
from fireflyer.identity import UserCredential


def test_a_token_is_good_as_it_is_read_from_a_file() -> None:
    _, credential, _ = parse("ff://host:7000", "fft1.name.secret\n")
    assert isinstance(credential, UserCredential)
    assert credential.token == "fft1.name.secret"


@pytest.mark.parametrize("where", [None, b"ff:///fs", 7, "fs", "/fs"])
def test_what_is_no_address_is_refused_in_the_same_words(where: object) -> None:
    with pytest.raises(UsageError, match="is not an address of a file system; write ff://host:port"):
        parse(where)


@pytest.mark.parametrize(
    ("default", "url", "given", "used"),
    [
        ("ff:///fs", "ff:///x", "mine", "mine"),
        ("ff:///fs", "ff:///x", None, None),
        ("ff://host:7000", "ff:///x", "mine", "mine"),
        ("ff://host:7000", "ff:///x", None, "of task"),
        ("ff:///fs", "ff://host:7000/x", "mine", "mine"),
        ("ff:///other", "ff://%2Ffs/x", "mine", "mine"),
    ],
)
def test_a_token_file_that_is_given_counts_however_the_cluster_is_named(
    monkeypatch: pytest.MonkeyPatch, default: str, url: str, given: str | None, used: str | None
) -> None:
    asked: list[tuple[str, str | None]] = []

    def shared(target: str, token: str | None = None, token_file: str | None = None) -> object:
        asked.append((target, token_file))
        return object()

    monkeypatch.setattr(connections, "shared", shared)
    monkeypatch.setenv(TARGET_VARIABLE, default)
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, "of task")
    assert connections.at(url, token_file=given).path == "/x"
    assert asked == [("ff:///fs" if "host" not in default + url else "ff://host:7000", used)]


@pytest.mark.parametrize("kind", [FileSystem, Files, OpenFile])
def test_who_pickles_a_client_is_told_what_to_use(kind: type) -> None:
    with pytest.raises(UsageError, match=f"a {kind.__name__} cannot be used in another process.*PerProcess"):
        pickle.dumps(object.__new__(kind))


def test_an_error_of_two_paths_says_both_and_goes_to_other_processes() -> None:
    error = pickle.loads(pickle.dumps(file_error(2, "", "/a", "/none/b")))
    assert isinstance(error, FileNotFoundError)
    assert (error.filename, error.filename2) == ("/a", "/none/b")
    assert str(error) == "[Errno 2] no such file or directory: '/a' -> '/none/b'"
