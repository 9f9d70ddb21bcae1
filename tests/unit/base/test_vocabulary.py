"""Old names of `old_names.md`, beside this file, are not used any more: those of the rows whose state is `done`.

A row is switched to `done` in the commit that renames. Not looked at: the table itself, the CHANGELOG,
recorded data below `tests/golden`, and text that is encoded: a string that is the old name and nothing else,
such as `tag="Held"` or `name="ticket"`, and of the words of prose those in strings without a space, such as
`f"{prefix}/doors"`."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

ROOT: Final = next(one for one in Path(__file__).resolve().parents if (one / "pyproject.toml").is_file())
TABLE: Final = "tests/unit/base/old_names.md"
EXCEPTED: Final = ("old_names.md", "CHANGELOG.md", "test_vocabulary.py")
RECORDED: Final = re.compile(r"tests/golden/.*(?<!\.py)")
FOLDERS: Final = ("src", "tests", "bench", "scripts", "docs", "cpp")
SUFFIXES: Final = (".py", ".pyi", ".md", ".cpp", ".hpp", ".txt", ".toml", "")
EVERYWHERE: Final = ("src/**", "tests/**", "bench/**", "scripts/**", "docs/**")
KINDS: Final = ("module", "symbol", "name", "C++", "word")
TOKENS: Final = re.compile(
    r"""
    (?:\b[bfru]{1,2})?                      # a string,
    (?: \"{3}(?:[^\\]|\\.)*?\"{3}
      | '{3}(?:[^\\]|\\.)*?'{3}
      | \"(?:[^\"\\\n]|\\.)*\"
      | '(?:[^'\\\n]|\\.)*'
    )
    | \#[^\n]*                             # a comment,
    | \w+                                  # a name or a number,
    | [^\s\w"'\#]+                         # operators
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
"""Of Python that can be compiled. The module `tokenize` finds the same in four times the time."""


class Row(NamedTuple):
    old: str
    new: str
    kind: str
    where: tuple[str, ...]
    state: str


def rows_of(table: str) -> list[Row]:
    """Rows of all tables with eight columns, without their heads."""
    rows = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|") or len(cells) != 8 or cells[2] not in KINDS:
            continue
        where = EVERYWHERE if cells[4] == "everywhere" else tuple(re.findall(r"`([^`]+)`", cells[4]))
        rows.append(Row(cells[0].strip("`"), cells[1].strip("`"), cells[2], where, cells[7]))
    return rows


def in_one_of(globs: tuple[str, ...]) -> Callable[[str], object]:
    """Whether a path is one of these, or below a folder that ends with `/**`."""
    wholes = [f"{re.escape(one[:-2])}.*" if one.endswith("/**") else fnmatch.translate(one) for one in globs]
    return re.compile("|".join(f"(?:{one})" for one in wholes), re.DOTALL).fullmatch


def is_excepted(path: str) -> bool:
    return path.endswith(EXCEPTED) or RECORDED.fullmatch(path) is not None


def identifiers_of(text: str) -> Iterator[str]:
    """Of Python: names in code and in braces of f-strings, and what stands in backticks."""
    for token in TOKENS.findall(text):
        if token.isidentifier():
            yield token
        elif token.startswith("#") or token.endswith(("'", '"')):
            if re.match(r"(?i)r?f", token):
                for part in re.findall(r"\{([^{}]*)\}", token):
                    yield from re.findall(r"\w+", part)
            for part in re.findall(r"`([^`\n]+)`", token):
                yield from re.findall(r"\w+", part)


def prose_of(text: str) -> str:
    """Of Python: all but the strings without a space, which are keys."""
    return " ".join(
        token
        for token in TOKENS.findall(text)
        if token.startswith("#") or not token.endswith(("'", '"')) or re.search(r"\s", token)
    )


class Tree:
    """The files below `root` that are looked at."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.texts = {
            str(path.relative_to(root)): path.read_text(errors="replace")
            for folder in FOLDERS
            for path in sorted((root / folder).rglob("*"))
            if path.is_file() and path.suffix in SUFFIXES and "__pycache__" not in path.parts
        }
        self._looked_at = [path for path in self.texts if not is_excepted(path)]
        self._with_word: dict[str, set[str]] = {}
        self._with_lower: dict[str, set[str]] = {}
        for path in self._looked_at:
            words = set(re.findall(r"\w+", self.texts[path]))
            for word in words:
                self._with_word.setdefault(word, set()).add(path)
            for word in {word.lower() for word in words}:
                self._with_lower.setdefault(word, set()).add(path)
        self._below: dict[tuple[str, ...], frozenset[str]] = {}
        self._identifiers: dict[str, frozenset[str]] = {}
        self._prose: dict[str, str] = {}

    def _matching(self, where: tuple[str, ...]) -> frozenset[str]:
        if where not in self._below:
            is_in = in_one_of(where)
            self._below[where] = frozenset(path for path in self._looked_at if is_in(path))
        return self._below[where]

    def _having_words(self, row: Row) -> set[str]:
        """Paths with all words of the old name: few, and only these are looked at closely."""
        known, old = (self._with_lower, row.old.lower()) if row.kind == "word" else (self._with_word, row.old)
        return set.intersection(*(known.get(word, set()) for word in re.findall(r"\w+", old)))

    def _uses(self, path: str, row: Row) -> bool:
        text = self.texts[path]
        if not re.search(rf"\b{re.escape(row.old)}\b", text, re.IGNORECASE if row.kind == "word" else 0):
            return False
        if row.kind == "word" and path.endswith((".py", ".pyi")):
            if path not in self._prose:
                self._prose[path] = prose_of(text)
            return re.search(rf"\b{re.escape(row.old)}\b", self._prose[path], re.IGNORECASE) is not None
        if row.kind in ("word", "C++") or not path.endswith((".py", ".pyi")):
            if path.endswith(".md") and row.kind != "word":
                parts = re.findall(r"`([^`\n]+)`", text)
                return any(re.search(rf"\b{re.escape(row.old)}\b", part) for part in parts)
            return True
        if path not in self._identifiers:
            self._identifiers[path] = frozenset(identifiers_of(text))
        return row.old in self._identifiers[path]

    def left(self, row: Row) -> list[str]:
        """Where the old name still is."""
        if row.kind == "module":
            return [row.old] if (self.root / row.old).exists() else []
        looked_at = self._matching(row.where)
        if not looked_at:
            return [f"{', '.join(row.where)}: no such file, so the row guards nothing"]
        return [path for path in sorted(looked_at & self._having_words(row)) if self._uses(path, row)]


def problems(root: Path, rows: list[Row]) -> list[str]:
    done = [row for row in rows if row.state == "done"]
    if not done:
        return []
    tree = Tree(root)
    return [f"{path}: {row.old} is now {row.new}" for row in done for path in tree.left(row)]


def test_names_that_were_replaced_are_not_used() -> None:
    assert problems(ROOT, rows_of((ROOT / TABLE).read_text())) == []


def test_each_row_of_the_table_can_be_checked() -> None:
    rows = rows_of((ROOT / TABLE).read_text())
    assert len(rows) > 300
    assert {row.kind for row in rows} == set(KINDS)
    assert [row for row in rows if row.state not in ("open", "done")] == []
    assert [row for row in rows if row.kind != "module" and not row.where] == []
    assert [row for row in rows if row.old == row.new] == []
    assert len({(row.old, row.kind, row.where) for row in rows}) == len(rows)


def one_row(old: str, new: str, kind: str, where: str, state: str = "done") -> list[Row]:
    return rows_of(f"| `{old}` | `{new}` | {kind} | a concept | {where} | 1 | unique | {state} |")


@pytest.mark.parametrize(
    ("path", "text", "old", "kind"),
    [
        ("src/a.py", "class Held:\n    pass\n", "Held", "symbol"),
        ("src/a.py", "import b\n\nx = b.Held(1)\n", "Held", "symbol"),
        ("src/a.py", '"""As `b.Held` says."""\n', "Held", "symbol"),
        ("src/a.py", "x = f'{held!r} of it'\n", "held", "name"),
        ("docs/a.md", "See `b.Held`.\n", "Held", "symbol"),
        ("docs/a.md", "The guest waits.\n", "guest", "word"),
        ("src/a.py", "# A Guest is let in.\n", "guest", "word"),
        ("src/a.py", '"""Guests are let in."""\n', "guests", "word"),
        ("src/a.py", "raise ValueError(f'no guest {name}')\n", "guest", "word"),
        ("src/a.py", "guest = 1\n", "guest", "word"),
        ("src/house.py", "", "src/house.py", "module"),
    ],
)
def test_an_old_name_is_found(tmp_path: Path, path: str, text: str, old: str, kind: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(text)
    assert len(problems(tmp_path, one_row(old, "new", kind, "everywhere"))) == 1
    assert problems(tmp_path, one_row(old, "new", kind, "everywhere", "open")) == []


def test_an_old_name_in_native_code_is_found(tmp_path: Path) -> None:
    (tmp_path / "cpp/src").mkdir(parents=True)
    (tmp_path / "cpp/src/a.hpp").write_text("using Ticket = int;\n")
    assert len(problems(tmp_path, one_row("Ticket", "Lsn", "C++", "`cpp/**`"))) == 1


def test_what_is_encoded_and_what_is_elsewhere_may_stay(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text(
        'class ChunkVersion(Struct, tag="Held"):\n    """Held until it is released."""\n'
    )
    (tmp_path / "src/b.py").write_text("class Held: ...\n")
    (tmp_path / "src/c.py").write_text('store.set(f"{prefix}/doors", "doors")\n')
    assert problems(tmp_path, one_row("doors", "peer listeners", "word", "`src/**`")) == []
    assert problems(tmp_path, one_row("Held", "ChunkVersion", "symbol", "`src/a.py`")) == []


def test_a_row_whose_files_are_gone_is_told(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text("")
    assert len(problems(tmp_path, one_row("Held", "HeldLock", "symbol", "`src/b.py`"))) == 1
