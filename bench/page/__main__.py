"""`python -m bench.page`: write summary, plots and README's table from docs/benchmarks/figures.toml."""

from __future__ import annotations

from pathlib import Path

import click

from bench.page.figures import missing, read_published
from bench.page.summary import contents


@click.command()
def main() -> None:
    """Write the summary and the plots of docs/benchmarks.md, and README's five figures.

    A figure that does not stand in the table of its page is an error.
    """
    root = Path(__file__).resolve().parents[2]
    published = read_published(root / "docs/benchmarks")
    if absent := missing(published, root / "docs/benchmarks"):
        raise click.ClickException("\n".join(("correct docs/benchmarks/figures.toml or the page:", *absent)))
    for path, text in contents(published, root).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
        click.echo(path)


if __name__ == "__main__":
    main()
