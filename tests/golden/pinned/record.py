"""Records what is new: `python -m tests.golden.pinned.record --add`.

A format of `registry.py` without recorded data gets its data, a case of `cases.py` its lines, and lists of `names` get
the names that the code has and they have not. Nothing that is recorded is ever changed: no file of data that exists is
written, and to the file of cases and to lists only lines are added.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.golden.pinned.cases import CASES
from tests.golden.pinned.names import KINDS, LISTS, list_file, recorded_names
from tests.golden.pinned.recorded import CASES_FILE, WIRE, case_lines, data_file, new_record, read_cases
from tests.golden.pinned.registry import FORMATS

__all__ = ["add_cases", "add_formats", "add_names"]


def add_formats() -> list[str]:
    """What was added, as of the other functions."""
    WIRE.mkdir(exist_ok=True)
    added = []
    for form in FORMATS:
        path = data_file(form.name, form.revision)
        if not path.exists():
            content = new_record(form)
            with path.open("xb") as file:
                file.write(content)
            added.append(f"format {form.name}, revision {form.revision}")
    return added


def add_cases() -> list[str]:
    known, added = read_cases(), []
    for name, case in CASES.items():
        if name not in known:
            with tempfile.TemporaryDirectory() as directory:
                lines = case_lines(name, case(Path(directory)))
            with CASES_FILE.open("ab") as file:
                file.write(lines)
            added.append(f"case {name}")
    return added


def add_names() -> list[str]:
    LISTS.mkdir(exist_ok=True)
    added = []
    for kind, names_now in KINDS.items():
        known = recorded_names(kind)
        if new := names_now() - known:
            list_file(kind).write_text("".join(f"{name}\n" for name in sorted(known | new)), encoding="utf-8")
            added += [f"{kind}: {name}" for name in sorted(new)]
    return added


def main() -> int:
    if sys.argv[1:] != ["--add"]:
        print(__doc__)
        return 2
    for line in [*add_formats(), *add_cases(), *add_names()] or ["nothing is new"]:
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
