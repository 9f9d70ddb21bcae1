"""Every public name has a docstring that says, from its first word, what the thing is."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts/api-reference"
PUBLIC: tuple[str, ...] = runpy.run_path(str(SCRIPT))["PUBLIC"]
BARE = re.compile(
    r"(What|Of|As|With|Without|Within|In|Into|On|At|By|For|From|To|Through|Over|Under|Between|Among|About|Per|Like|Unlike|"
    r"How|Why|Who|Whom|Whose|Where|When|Which|While|It|Its|They|Them|Their|Until|Since|After|Before|That|This|These|Those|"
    r"Nothing|Nobody|So|If|Because|There|Then|Here|Beside|Beyond|Also|Not|But|And|Or)\b"
)


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_of_public_names_begin_with_what_the_thing_is(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, name
    faults = []
    for public in getattr(module, "__all__", ()):
        thing = getattr(module, public)
        if not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        if not (inspect.getdoc(thing) if inspect.isfunction(thing) else thing.__dict__.get("__doc__")):
            faults.append(f"{public} has no docstring")
        for member, text in _docstrings(public, thing):
            if BARE.match(text):
                faults.append(f"{member} begins with a word that names nothing: {text.splitlines()[0]}")
    assert not faults, "\n".join(faults)


def _docstrings(name: str, thing: object) -> list[tuple[str, str]]:
    found = [(name, inspect.getdoc(thing) or "")]
    if inspect.isclass(thing):
        for member, value in vars(thing).items():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if not member.startswith("_") and inspect.isfunction(function) and function.__doc__:
                found.append((f"{name}.{member}", function.__doc__))
    return found


def test_every_module_that_documentation_imports_is_in_the_reference() -> None:
    named = {
        name: page.relative_to(ROOT)
        for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
        if page.parent.name != "design"
        for name in imported(page.read_text())
    }
    assert len(named) > 20
    missing = {name: str(page) for name, page in named.items() if name not in PUBLIC}
    assert missing == {}, "add them to scripts/api-reference, or let the page import from a public package"


def imported(text: str) -> set[str]:
    """Modules of Fire-Flyer that Python in a page imports."""
    return set(re.findall(r"^[ +>]*(?:from|import) (fireflyer[.\w]*)", text, re.MULTILINE))


def test_imports_are_found_however_a_page_shows_them() -> None:
    page = (
        "+from fireflyer.data import x\n    import fireflyer.sim\nfrom fireflyer.a.b import (\nwe import fireflyer.no\n"
    )
    assert imported(page) == {"fireflyer.data", "fireflyer.sim", "fireflyer.a.b"}


@pytest.mark.slow
def test_the_reference_is_made(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = {
        page.relative_to(tmp_path).with_suffix("").as_posix().replace("/", ".") for page in tmp_path.rglob("*.html")
    }
    assert set(PUBLIC) <= pages
    shown = re.sub("<[^>]*>", "", (tmp_path / "fireflyer/collectives.html").read_text())
    assert re.search(r"def\s+allreduce\(", shown)
