"""Links between the pages of the documentation lead somewhere, and every page can be reached from docs/README.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = next(one for one in Path(__file__).resolve().parents if (one / "pyproject.toml").is_file())
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\((?P<path>[^)\s#:]*)(?:#(?P<anchor>[^)\s]+))?\)")
IMAGE = re.compile(r'<img src="(?P<path>[^"]+)"')
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


class Link(NamedTuple):
    page: Path
    target: Path
    anchor: str | None


def links_of(page: Path) -> Iterator[Link]:
    text = FENCE.sub("", page.read_text())
    for found in LINK.finditer(text):
        target = (page.parent / found["path"]).resolve() if found["path"] else page
        yield Link(page, target, found["anchor"])
    for found in IMAGE.finditer(text):
        yield Link(page, (page.parent / found["path"]).resolve(), None)


def anchors_of(page: Path) -> set[str]:
    """As GitHub makes them from headings: small letters, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    dead = []
    for page in PAGES:
        for link in links_of(page):
            if not link.target.exists():
                dead.append(f"{page.relative_to(ROOT)}: {link.target.name} is not there")
            elif link.anchor and link.target.suffix == ".md" and link.anchor not in anchors_of(link.target):
                dead.append(f"{page.relative_to(ROOT)}: {link.target.name} has no heading #{link.anchor}")
    assert dead == []


def test_every_page_is_reached_from_the_index() -> None:
    reached, waiting = set(), [ROOT / "docs/README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        waiting += [link.target for link in links_of(page) if link.target.suffix == ".md" and link.target.exists()]
    assert [str(page.relative_to(ROOT)) for page in PAGES if page not in reached] == []


def test_every_how_to_is_in_the_index_itself() -> None:
    listed = {link.target for link in links_of(ROOT / "docs/README.md")}
    assert sorted(page.name for page in (ROOT / "docs/how-to").glob("*.md") if page not in listed) == []


def test_every_image_is_shown_on_a_page_and_is_small() -> None:
    images = {path for path in (ROOT / "docs/images").rglob("*") if path.is_file()}
    shown = {link.target for page in PAGES for link in links_of(page)}
    assert sorted(str(path.relative_to(ROOT)) for path in images - shown) == []
    assert [path.name for path in images if path.stat().st_size > 150_000] == []
