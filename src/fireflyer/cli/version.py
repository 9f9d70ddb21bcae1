"""`ff version`: what is installed, without importing any of the large parts."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import click

import fireflyer

__all__ = ["command", "installed_versions"]


def installed_versions() -> list[tuple[str, str]]:
    """`(name, version)` rows. torch is looked up, not imported."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed; training needs it: pip install 'fireflyer[train]'"
    try:
        from fireflyer import native

        kernels = f"{native.active_isa()} (this machine could run: {', '.join(native.isa_names())})"
    except ImportError as error:
        kernels = f"not usable: {error}"
    return [
        ("fireflyer", fireflyer.__version__),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("torch", torch),
        ("kernels", kernels),
    ]


@click.command("version", short_help="Show what is installed.", epilog="Example: ff version")
def command() -> None:
    """Show the versions of Fire-Flyer, Python and torch, and the kernels in use."""
    for name, value in installed_versions():
        click.echo(f"{name:<10} {value}")
