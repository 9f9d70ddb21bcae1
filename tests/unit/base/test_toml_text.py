"""Configurations that are written as TOML are read again."""

from __future__ import annotations

import math
import tomllib

from fireflyer.base.toml_text import to_toml


def test_numbers_that_are_not_finite_are_written_as_toml_has_them() -> None:
    table = {"largest": math.inf, "least": -math.inf, "list": [1.5, math.inf], "table": {"inline": {"one": math.inf}}}
    assert tomllib.loads(to_toml(table)) == table
    assert math.isnan(tomllib.loads(to_toml({"none": math.nan}))["none"])
