"""Records what is new: `python -m tests.golden.pinned.record --add`.

A format of `registry.py` without recorded data gets its data, and lists of `names` get the names that the code has and
they have not. What is recorded is never changed: this program writes no file that exists, but for lines that it adds to
lists of names.
"""

from __future__ import annotations

import sys

from tests.golden.pinned.recorded import WIRE, data_file, new_record
from tests.golden.pinned.registry import FORMATS

__all__ = ["add_formats"]


def add_formats() -> list[str]:
    """What was added."""
    WIRE.mkdir(exist_ok=True)
    added = []
    for form in FORMATS:
        path = data_file(form.name, form.revision)
        if not path.exists():
            content = new_record(form)
            with path.open("xb") as file:
                file.write(content)
            added.append(str(path.relative_to(WIRE.parent)))
    return added


def main() -> int:
    if sys.argv[1:] != ["--add"]:
        print(__doc__)
        return 2
    for line in add_formats() or ["nothing is new"]:
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
