"""Configurations as TOML: the standard library reads it only."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["to_toml", "toml_value"]


def to_toml(table: Mapping[str, Any]) -> str:
    """Numbers, booleans, texts and lists of them, then such tables and lists of them: what configurations are made
    of. What is deeper is written as inline tables; TOML has nothing for None."""
    plain = {key: value for key, value in table.items() if not _is_tables(value) and not isinstance(value, dict)}
    lines = [f"{key} = {toml_value(value)}" for key, value in plain.items()]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += ["", f"[{key}]", *(f"{name} = {toml_value(one)}" for name, one in value.items())]
        if _is_tables(value):
            for row in value:
                lines += ["", f"[[{key}]]", *(f"{name} = {toml_value(one)}" for name, one in row.items())]
    return "\n".join(lines) + "\n"


def _is_tables(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], dict)


def toml_value(value: object) -> str:
    """Right of `=`; tables are inline ones."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {toml_value(one)}' for name, one in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # inf, -inf or nan, which JSON calls otherwise
    return json.dumps(value, ensure_ascii=False)
