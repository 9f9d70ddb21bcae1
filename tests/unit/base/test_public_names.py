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

SCRIPT = Path(__file__, "../../../../scripts/api-reference").resolve()
PUBLIC: tuple[str, ...] = runpy.run_path(str(SCRIPT))["PUBLIC"]
BARE = re.compile(
    r"(What|Of|As|With|Without|In|On|At|By|For|From|To|Who|Whom|Where|When|Which|It|Its|They|Their|Until|After|Before|"
    r"That|This|These|Those|Nothing|So|If|There|Then|Beside|Also)\b"
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
