"""The `ff` command."""

from fireflyer.cli.main import main

__all__ = ["main"]
