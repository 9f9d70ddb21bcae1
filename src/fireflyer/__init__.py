"""Fire-Flyer: train large models on an affordable cluster, and keep training when parts of it break."""

__all__ = ["__version__"]

# Here and not in the metadata of the package: to read these takes each process longer than Python's own start.
__version__ = "0.1.0"
