"""Reads the config.json of a model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from fireflyer.base.errors import UsageError

if TYPE_CHECKING:
    from fireflyer.codesign.model import ModelShape

__all__ = ["read_shape"]

MAX_CONFIG_BYTES: Final = 1 << 20


def read_shape(path: str, *, named_in: str = "") -> ModelShape:
    """The shape of the model whose config.json is `path`; `named_in`: a file that names it. Raises `UsageError`."""
    import json

    from fireflyer.codesign.model import shape_from_config

    where = f"{named_in!r}: " if named_in else ""
    try:
        if not os.path.isfile(path):
            raise UsageError(f"{where}model {path!r} is not a file; give the path of a config.json")
        with open(path, "rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{where}model {path!r} cannot be read: {error.strerror or error}") from error
    if len(data) > MAX_CONFIG_BYTES:
        raise UsageError(f"model {path!r} is larger than {MAX_CONFIG_BYTES} bytes; give a config.json")
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"model {path!r} is no JSON object: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"model {path!r} is no JSON object; give a config.json")
    try:
        return shape_from_config(config)
    except UsageError as error:
        raise UsageError(f"model {path!r}: {error}") from error
