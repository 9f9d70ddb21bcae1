"""Which files are not in a snapshot: `.ffignore`, in any directory, with the rules of gitignore(5).

As for git, the last rule that matches decides, those of a deeper file come after those of a higher one, and nothing
below an ignored directory can be taken back. `DEFAULTS` come before all others: `!.venv` takes one of them back.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.base.os_errors import translate_os_error

__all__ = ["DEFAULTS", "IGNORE_FILE", "Rules", "default_rules", "rules_below"]

IGNORE_FILE: Final = ".ffignore"
GIT_IGNORE_FILE: Final = ".gitignore"
MAX_IGNORE_BYTES: Final = 256 << 10
MAX_RULES: Final = 2000
DEFAULTS: Final = (".git", ".hg", ".svn", "__pycache__", ".venv", ".mypy_cache", ".pytest_cache", ".ruff_cache")


class _Rule(NamedTuple):
    matches: Callable[[str], object]
    ignores: bool
    only_inside: bool
    """Of `a/**`: what is in `a`, and not `a` itself."""


class Rules(NamedTuple):
    """Rules of the files from the top down to one directory, each with the path (and a slash) where its file is."""

    files: tuple[tuple[str, tuple[_Rule, ...]], ...]
    git: bool

    def ignores(self, path: str, is_directory: bool) -> bool:
        for prefix, rules in reversed(self.files):
            below = path[len(prefix) :]
            named = f"{below}/" if is_directory else below
            for rule in reversed(rules):
                if rule.matches(below if rule.only_inside else named):
                    return rule.ignores
        return False


def default_rules(more: Sequence[str] = (), *, git: bool = False) -> Rules:
    """`more`: rules that come after the defaults. `git`: files `.gitignore` count as well, before `.ffignore`."""
    return Rules((("", _parsed((*DEFAULTS, *more), "the rules")),), git)


def rules_below(rules: Rules, directory: str, path: str, names: Sequence[str]) -> Rules:
    """With those of the directory `path` of the snapshot, which is `directory` and has the files `names`. Raises
    `UsageError` for rules that cannot be understood."""
    prefix = f"{path}/" if path else ""
    files = rules.files
    for name in (GIT_IGNORE_FILE, IGNORE_FILE) if rules.git else (IGNORE_FILE,):
        if name in names:
            where = os.path.join(directory, name)
            files = (*files, (prefix, _parsed(_lines(where), where)))
    return rules if files is rules.files else Rules(files, rules.git)


def _lines(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return []
            data = file.read(MAX_IGNORE_BYTES + 1)
    except OSError as error:
        raise translate_os_error(error, f"read {path}") from error
    if len(data) > MAX_IGNORE_BYTES:
        raise UsageError(f"{path} is longer than {MAX_IGNORE_BYTES} bytes; write rules for directories, not for files")
    return data.decode(errors="surrogateescape").splitlines()


def _parsed(lines: Sequence[str], where: str) -> tuple[_Rule, ...]:
    if len(lines) > MAX_RULES:
        raise UsageError(f"{where} has more than {MAX_RULES} lines; write rules for directories, not for files")
    try:
        import pathspec
    except ImportError:
        raise UsageError("snapshots need pathspec; run: pip install 'fireflyer[platform]'") from None
    try:
        patterns = pathspec.GitIgnoreSpec.from_lines(map(_as_git_reads, lines)).patterns
    except ValueError as error:
        raise UsageError(f"{where} has a rule that is not understood ({error})") from None
    return tuple(_rule(regex, one.include) for one in patterns if one.include is not None and (regex := one.regex))


def _rule(regex: re.Pattern[str], ignores: bool) -> _Rule:
    """The library's patterns with `ps_d` also match what is in a directory that they match. Here a directory is asked
    for before what is in it, so they must match a whole path: `*` and `!d` keep `d`, and ignore what is in it."""
    if "ps_d" in regex.groupindex:
        return _Rule(re.compile(rf"(?:{regex.pattern})\Z").search, ignores, False)
    return _Rule(regex.search, ignores, True)


def _as_git_reads(line: str) -> str:
    """Git takes a lone `!`, which matches nothing, and `a/**/`, which is directories in `a`; the library does not."""
    rule = line.rstrip()
    if rule in ("!", "!/"):
        return ""
    return f"{rule}*/" if rule.endswith("/**/") else line
