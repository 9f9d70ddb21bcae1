"""Shell completion in a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.patience import allowed_s

ASK = """
eval "$(ff completion bash)"
complete -p ff
COMP_WORDS=(ff "$@")
COMP_CWORD=$#
_ff_completion ff
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_commands_and_values(tmp_path: Path) -> None:
    program = tmp_path / "ff"
    start = f"#!{sys.executable} -P\nimport sys\nfrom fireflyer.cli import main\nsys.exit(main())\n"
    program.write_text(start, encoding="utf-8")
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ.get('PATH', '')}"}

    def complete(*words: str) -> list[str]:
        done = subprocess.run(
            ["bash", "--norc", "-c", ASK, "bash", *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=allowed_s(60),
            check=True,
        )
        registered, *replies = done.stdout.splitlines()
        assert registered.endswith("-F _ff_completion ff")
        return [reply for reply in replies if reply]

    assert complete("coll") == ["collectives"]
    assert complete("run", "--devices", "g") == ["gpu"]
