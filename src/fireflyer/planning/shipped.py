"""What the package ships for planners: networks of both papers, shapes of models that they name, fitted prices.

Pure: these files are data of the package, and the same wherever a release is installed. Files of a user are read by who
calls `planning`, as `ff plan` does. Nodes are shipped by `codesign.parallel` (`load_node`).
"""

from __future__ import annotations

import json
from typing import Final

from fireflyer.base.decoding import decode_toml
from fireflyer.base.shipped import ShippedFiles
from fireflyer.codesign.model import ModelShape, shape_from_config
from fireflyer.planning.network_file import NetworkFile
from fireflyer.planning.prices import PriceList

__all__ = ["fitted_prices", "load_network", "load_shape", "network_names", "shape_names"]

_NETWORKS: Final = ShippedFiles("fireflyer.planning", "networks", ".toml", "network")
_SHAPES: Final = ShippedFiles("fireflyer.planning", "models", ".json", "model")
_PRICES: Final = ShippedFiles("fireflyer.planning", "published", ".toml", "list of prices")


def network_names() -> tuple[str, ...]:
    """Names of the networks that are shipped."""
    return _NETWORKS.names()


def load_network(name: str) -> NetworkFile:
    """Network of that name, as `fire-flyer-2`. Raises `UsageError` with the names that there are."""
    return decode_toml(_NETWORKS.read(name), NetworkFile)


def shape_names() -> tuple[str, ...]:
    """Names of the models whose shapes are shipped."""
    return _SHAPES.names()


def load_shape(name: str) -> ModelShape:
    """Shape of the model of that name, as `deepseek-v3`. Raises `UsageError` with the names that there are."""
    return shape_from_config(json.loads(_SHAPES.read(name)))


def fitted_prices() -> PriceList:
    """Prices in USD of a switch, a link and an endpoint that give four of the five costs in table 3 of the DeepSeek-V3
    paper, which does not print its prices: others give them, too."""
    return decode_toml(_PRICES.read("v3-table-3"), PriceList)
