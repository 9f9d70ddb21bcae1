"""Errors cross the network as a code and a message, and stay what Python promises."""

from __future__ import annotations

import errno

import pytest

from fireflyer.base import errors
from fireflyer.base.errors import FireflyerError, error_from_wire, error_to_wire

_PUBLIC: list[type[FireflyerError]] = [
    value
    for name in errors.__all__
    if isinstance(value := getattr(errors, name), type)
    and issubclass(value, FireflyerError)
    and value is not FireflyerError
]


@pytest.mark.parametrize("cls", _PUBLIC, ids=lambda cls: cls.__name__)
def test_each_class_survives_the_wire(cls: type[FireflyerError]) -> None:
    code, message = error_to_wire(cls("disk 3: it broke; replace it"))
    again = error_from_wire(code, message)
    assert type(again) is cls
    assert str(again) == "disk 3: it broke; replace it"


def test_codes_are_distinct() -> None:
    assert len({cls.code for cls in _PUBLIC}) == len(_PUBLIC)


def test_an_error_that_is_not_ours_crosses_without_its_traceback() -> None:
    assert error_to_wire(KeyError("x")) == ("invariant_violation", "unexpected KeyError: 'x'")


def test_what_utf_8_cannot_hold_crosses_as_an_escape() -> None:
    """Of a path that is no UTF-8: an encoder would raise where the error is to be told."""
    assert error_to_wire(errors.NotFound("/data/\udcff: no such file")) == ("not_found", r"/data/\udcff: no such file")
    assert error_to_wire(OSError("\udcff"))[1] == r"unexpected OSError: \udcff"


def test_an_unknown_code_from_a_newer_peer_is_permanent() -> None:
    again = error_from_wire("teapot", "no coffee")
    assert type(again) is errors.PermanentError
    assert "teapot" in str(again)


@pytest.mark.parametrize(
    ("cls", "builtin", "number"),
    [
        (errors.NotFound, FileNotFoundError, errno.ENOENT),
        (errors.Exists, FileExistsError, errno.EEXIST),
        (errors.NoSpace, OSError, errno.ENOSPC),
        (errors.PermissionDenied, PermissionError, errno.EACCES),
    ],
)
def test_file_errors_are_also_pythons_own(cls: type[FireflyerError], builtin: type[OSError], number: int) -> None:
    error = cls("/data/a: no")
    assert isinstance(error, builtin)
    assert error.errno == number
    assert str(error) == "/data/a: no"


def test_a_usage_error_is_a_value_error_and_a_timeout_a_timeout_error() -> None:
    assert issubclass(errors.UsageError, ValueError)
    assert issubclass(errors.Timeout, TimeoutError)
    assert issubclass(errors.Unreachable, ConnectionError)
