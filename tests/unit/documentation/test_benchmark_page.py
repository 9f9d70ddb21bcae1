"""What is published is the same everywhere: figures.toml, the tables of the pages, summary, plots, README."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from bench.page.figures import Figure, Published, missing, parse_amount, read_published, short
from bench.page.summary import contents, replace_block

ROOT = next(one for one in Path(__file__).resolve().parents if (one / "pyproject.toml").is_file())
PAGES = ROOT / "docs/benchmarks"


@pytest.fixture(scope="module")
def published() -> Published:
    return read_published(PAGES)


def test_every_published_figure_stands_in_the_table_of_its_page(published: Published) -> None:
    assert missing(published, PAGES) == []


def test_summary_plots_and_readme_are_those_of_the_figures(published: Published) -> None:
    stale = [path for path, text in contents(published, ROOT).items() if (ROOT / path).read_text() != text]
    assert stale == [], "run: .venv/bin/python -m bench.page"


def test_readme_has_five_figures_and_each_has_a_peer(published: Published) -> None:
    chosen = [one for one in published.figure if one.readme]
    assert len(chosen) == 5
    assert all(one.readme_peers for one in chosen)


def test_readme_shows_the_best_peer_or_one_that_is_better(published: Published) -> None:
    for one in published.figure:
        if one.readme and one.best_peer is not None:
            choose = max if one.better == "higher" else min
            shown = [one.amount_of(name).value for name in one.readme_peers]
            assert choose(shown) == choose(*shown, one.best_peer[1].value), one.readme


def test_every_machine_is_named_and_every_page_exists(published: Published) -> None:
    assert {one.machine for one in published.figure} == published.machines.keys()
    linked = (ROOT / "docs/benchmarks.md").read_text()
    assert all(f"(benchmarks/{page.name})" in linked for page in PAGES.glob("*.md"))


def test_titles_and_labels_of_plots_fit(published: Published) -> None:
    assert [one.title for one in published.plot if len(one.title) > 82] == []
    assert [group.label for one in published.plot for group in one.groups if len(group.label) > 24] == []


def changed(figure: Figure, **fields: object) -> Published:
    return Published(machines={}, figure=(msgspec.structs.replace(figure, **fields),), plot=())


@pytest.mark.parametrize("wrong", [{"ours": "1.31 ms"}, {"ours": "1314 us"}, {"peers": {"DCP": "1598 ms"}}])
def test_a_figure_that_is_not_in_its_table_is_found(published: Published, wrong: dict[str, object]) -> None:
    (save,) = [one for one in published.figure if one.rows == ("save/disk/64x32MiB",)]
    assert missing(changed(save), PAGES) == []
    assert len(missing(changed(save, **wrong), PAGES)) == 1


def test_the_best_peer_is_the_least_time_or_the_highest_rate(published: Published) -> None:
    times = msgspec.structs.replace(
        published.figure[0], ours="2 ms", peers={"a": "1.50 ms", "b": "900 us"}, better="lower"
    )
    assert times.best_peer == ("b", parse_amount("900 us"))
    assert times.times_best_peer == pytest.approx(0.45)
    rates = msgspec.structs.replace(times, ours="4 GB/s", peers={"a": "1 GB/s", "b": "2 GB/s"}, better="higher")
    assert rates.times_best_peer == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("text", "shown"), [("1314 ms", "1.3 s"), ("39.2 ms", "39 ms"), ("0.79 ms", "790 us"), ("386,961 s", "386961 s")]
)
def test_amounts_are_short_in_readme(text: str, shown: str) -> None:
    assert short(parse_amount(text)) == shown


def test_a_page_without_a_place_for_the_figures_is_refused() -> None:
    with pytest.raises(ValueError, match="no lines"):
        replace_block("# A page\n", "summary", "text")
