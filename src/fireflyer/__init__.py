"""Fire-Flyer: train large models on an affordable cluster, and keep training when parts of it break."""

from importlib.metadata import version

__all__ = ["__version__"]

__version__ = version("fireflyer")
