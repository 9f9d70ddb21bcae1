"""Reads recipes of training runs."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any, Final

from fireflyer.base.decoding import DECODE_ERRORS
from fireflyer.base.errors import UsageError
from fireflyer.cli.toml_files import line_of, read_text

if TYPE_CHECKING:
    from fireflyer.recipes.trainer.core.recipe import Recipe

__all__ = ["MANUAL", "read_raw", "read_recipe"]

MANUAL: Final = "docs/how-to/train.md"


def read_recipe(path: str) -> tuple[Recipe, str]:
    """The recipe of the file, with paths as they stand there, and its digest. Raises `UsageError`: one line that names
    the file, the line in it if it can be told, the key, and what is allowed."""
    from fireflyer.recipes.trainer.core.parsing import recipe_of
    from fireflyer.recipes.trainer.core.recipe import identity_of

    raw = read_raw(path)
    try:
        recipe = recipe_of(raw)
    except UsageError as error:
        raise UsageError(f"FILE {path!r}: {error}; its keys: {MANUAL}") from error
    return recipe, identity_of(recipe)


def read_raw(path: str) -> dict[str, Any]:
    """The file as tables, every key known. Raises `UsageError`."""
    from fireflyer.recipes.trainer.core.parsing import unknown_key

    data = read_text(path, name="FILE", advice=f"give a recipe, see {MANUAL}")
    try:
        text = data.decode()
        raw = tomllib.loads(text)
    except (*DECODE_ERRORS, ValueError) as error:  # tomllib's errors, and those of bytes that are no text
        raise UsageError(f"FILE {path!r}: {error}; its keys: {MANUAL}") from error
    found = unknown_key(raw)
    if found is not None:
        place = f"$.{found.table}" if found.table else "$"
        line = line_of(text, f"unknown field `{found.key}` - at `{place}`")
        raise UsageError(f"FILE {path!r}{f', line {line}' if line else ''}: {found}")
    return raw
