"""A TOML file with a value that is not known is refused with the values that are."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import pytest

from fireflyer.base.errors import UsageError
from fireflyer.cli.toml_files import read_toml


class Port(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    speed: Literal["slow", "fast"] | None = None
    count: int = 1


class Machine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    kind: Literal["gpu", "storage"]
    ports: tuple[Port, ...] = ()
    named: dict[str, Port] = {}
    first: Port | None = None


@pytest.mark.parametrize(
    ("text", "line", "choices"),
    [
        ('kind = "cpu"', 1, "gpu, storage"),
        ('kind = "gpu"\n[[ports]]\nspeed = "fast"\n[[ports]]\nspeed = "quick"', 5, "fast, slow"),
        ('kind = "gpu"\n[first]\nspeed = "quick"', 3, "fast, slow"),
    ],
)
def test_a_value_that_is_not_known_is_refused_with_those_that_are(
    tmp_path: Path, text: str, line: int, choices: str
) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_toml(str(path), Machine, name="FILE", advice="give a TOML file")
    assert str(caught.value).startswith(f"FILE {str(path)!r}, line {line}: ")
    assert ": Invalid enum value " in str(caught.value)
    assert str(caught.value).endswith(f"; use {choices}")


def test_values_of_a_table_with_free_names_are_found_too(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text('kind = "gpu"\n[named.left]\nspeed = "quick"')
    with pytest.raises(UsageError, match=r"; use fast, slow$"):
        read_toml(str(path), Machine, name="FILE", advice="give a TOML file")


def test_other_mistakes_name_no_choices(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text('kind = "gpu"\n[first]\ncount = "two"')
    with pytest.raises(UsageError) as caught:
        read_toml(str(path), Machine, name="FILE", advice="give a TOML file")
    assert "; use " not in str(caught.value)
