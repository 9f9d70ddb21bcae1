"""Every public name has a docstring that says, from its first word, what the thing is; so do modules and attributes."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
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
    names = getattr(module, "__all__", ())
    texts = [("the module", module.__doc__)]
    texts += [(one, text) for one, text in _attributes(ast.parse(_text(str(module.__file__))).body) if one in names]
    faults = []
    for public in names:
        thing = getattr(module, public)
        if not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        if not (inspect.getdoc(thing) if inspect.isfunction(thing) else thing.__dict__.get("__doc__")):
            faults.append(f"{public} has no docstring")
        texts += _docstrings(public, thing)
    faults += [
        f"{member} begins with a word that names nothing: {text.splitlines()[0]}"
        for member, text in texts
        if BARE.match(text)
    ]
    assert not faults, "\n".join(faults)


def _docstrings(name: str, thing: object) -> list[tuple[str, str]]:
    found = [(name, inspect.getdoc(thing) or "")]
    if inspect.isclass(thing):
        for member, value in vars(thing).items():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if not member.startswith("_") and inspect.isfunction(function) and function.__doc__:
                found.append((f"{name}.{member}", function.__doc__))
        found += [(f"{name}.{member}", text) for member, text in _attributes(_body_of(thing))]
    return found


def _body_of(thing: type) -> Sequence[ast.stmt]:
    """Statements of a class; none for one of native code. Only its lines are parsed: whole files would take seconds."""
    file = getattr(sys.modules[thing.__module__], "__file__", None)
    if file is None or not file.endswith(".py"):
        return []
    lines = re.search(rf"^class {thing.__name__}\b.*?(?=^[^\s)]|\Z)", _text(file), re.MULTILINE | re.DOTALL)
    statement = ast.parse(lines[0]).body[0] if lines is not None else None
    return statement.body if isinstance(statement, ast.ClassDef) else []


@cache
def _text(file: str) -> str:
    return Path(file).read_text()


def _attributes(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Names and docstrings of attributes. A string below an assignment is one, which Python itself does not keep."""
    for above, below in itertools.pairwise(body):
        if isinstance(above, ast.Assign | ast.AnnAssign) and isinstance(below, ast.Expr):
            target = above.targets[0] if isinstance(above, ast.Assign) else above.target
            if isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
                yield ast.unparse(target), below.value.value


def test_docstrings_of_attributes_are_found_below_fields_and_members() -> None:
    body = ast.parse("class C:\n    a: int = 0\n    'Number of it.'\n    b = 1\n    c: int\n    'Of one.'\n").body[0]
    assert isinstance(body, ast.ClassDef)
    assert list(_attributes(body.body)) == [("a", "Number of it."), ("c", "Of one.")]


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
