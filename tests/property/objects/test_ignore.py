"""`.ffignore` means what git makes of the same lines in `.gitignore`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.objects.memory import make_tree

from fireflyer.cluster.core.objects.manifest import FileEntry
from fireflyer.cluster.objects import take_snapshot

NAMES = ("a", "b", "a.log", "b.txt", "[x]", "c d")
PATHS = tuple(
    f"{top}{middle}{name}" for top in ("", "a/", "b/") for middle in ("", "d/") for name in ("x.log", *NAMES[2:])
)
_part = st.sampled_from(
    ["a", "b", "d", "*", "**", "*.log", "?", "x.*", "[ab]", "[!a]*", "c d", "\\[x\\]", "b.txt", "*.t*"]
)
_rule = st.builds(
    lambda negated, anchored, parts, directory: f"{negated}{anchored}{'/'.join(parts)}{directory}",
    st.sampled_from(["", "", "!"]),
    st.sampled_from(["", "", "/"]),
    st.lists(_part, min_size=1, max_size=3),
    st.sampled_from(["", "", "/"]),
)
_other = st.sampled_from(["", "# a comment", "a \\ ", "b.txt  ", "\\!x", "!", "\\#x"])
_lines = st.lists(st.one_of(_rule, _rule, _rule, _other), max_size=6)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("git") is None:
        pytest.skip("no git on this machine")
    root = make_tree(tmp_path_factory.mktemp("ignore") / "work", dict.fromkeys(PATHS, ""))
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


def of_git(root: Path) -> list[str]:
    command = ["git", "-C", str(root), "-c", "core.excludesFile=/dev/null", "ls-files", "-zo", "--exclude-standard"]
    return sorted(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")[:-1])


@settings(max_examples=150)
@given(top=_lines, below=_lines)
def test_what_is_ignored_is_what_git_ignores(tree: Path, top: list[str], below: list[str]) -> None:
    (tree / ".gitignore").write_text("\n".join(top) + "\n")
    (tree / "a" / ".gitignore").write_text("\n".join(below) + "\n")
    manifest = take_snapshot(str(tree), git_ignore=True)
    files = [entry.path for entry in manifest.entries if isinstance(entry, FileEntry)]
    assert [path for path in files if not path.startswith(".git/")] == of_git(tree)  # `!*` takes it back
