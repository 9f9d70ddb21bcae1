"""`ff fs meta`: a meta service of its own."""

from __future__ import annotations

import click

from fireflyer.cli.fs.processes import log_option, read_config, run_process
from fireflyer.cli.units import print_unit, unit_option

__all__ = ["meta_command"]


@click.command("meta", short_help="Run a meta service.", epilog="Example: ff fs meta /etc/fireflyer/meta.toml")
@log_option
@unit_option
@click.argument("config_file", metavar="CONFIG")
def meta_command(*, config_file: str, log_file: str | None, unit: str | None) -> int:
    """Run a meta service in the foreground, configured by the TOML file CONFIG, until SIGTERM or Ctrl-C.

    Only for clusters whose managers share a PostgreSQL database. With an embedded store, the manager process contains
    the meta service."""
    from fireflyer.fs.client.chunk_session import open_chunk_session
    from fireflyer.fs.service.meta.config import MetaConfig
    from fireflyer.fs.service.meta.process import run_meta

    config = read_config(config_file, MetaConfig)
    if unit is not None:
        return print_unit(
            unit, name="fireflyer-fs-meta", what="meta service of 3FS", words=("fs", "meta"), config=config_file,
            log_file=log_file,
        )  # fmt: skip
    return run_process(lambda on_ready: run_meta(config, open_chunks=open_chunk_session, on_ready=on_ready), log_file)
