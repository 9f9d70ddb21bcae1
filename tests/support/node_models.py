"""The node models of the package."""

from __future__ import annotations

from importlib.resources import files

import msgspec

from fireflyer.codesign.parallel import NodeModel

__all__ = ["node_model"]


def node_model(name: str) -> NodeModel:
    text = files("fireflyer.codesign.parallel").joinpath(f"nodes/{name}.toml").read_text(encoding="utf-8")
    return msgspec.toml.decode(text, type=NodeModel)
