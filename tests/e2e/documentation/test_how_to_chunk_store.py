"""What docs/how-to/chunk-store.md tells users to type works."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.how_to import Shell

from fireflyer.fs.core.requests.effects import Limits
from fireflyer.identity.secrets import new_secret, save_secret

TEXT = (Path(__file__).parents[3] / "docs/how-to/chunk-store.md").read_text()


def test_every_setting_that_is_named_exists() -> None:
    named = [name for row in re.findall(r"^\| (`.*?) \|", TEXT, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
    assert "senders" in named
    assert all(name in Limits.__struct_fields__ for name in named)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_programs_run(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    with shell.chunk_store(TEXT):
        first, second, third = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
        assert "changed" in shell.run(sys.executable, "-c", first)
        assert "4096" in shell.run(sys.executable, "-c", second)
        if importlib.util.find_spec("torch"):
            assert shell.run(sys.executable, "-c", third).count("torch.Size([4, 1024])") == 2


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cluster_made_by_hand_holds_files(tmp_path: Path) -> None:
    """Each line of "On several machines" in its order, with both machines on this one."""
    manager_toml, storage_toml, commands = re.findall(
        r"```\n(.*?)```", TEXT.partition("## On several machines")[2].partition("## From Python")[0], re.DOTALL
    )
    for directory in ("etc", "var"):
        (tmp_path / directory).mkdir(mode=0o700)
    save_secret(new_secret(), str(tmp_path / "etc/node-secret"))
    shell = Shell(tmp_path)
    words: dict[str, str] = {"/etc/fireflyer": f"{tmp_path}/etc", "10.0.0.1:7000": "127.0.0.1:0"}
    words |= {"/var/lib/fireflyer": f"{tmp_path}/var", "10.0.0.7": "127.0.0.1", "port = 7100": "port = 0"}
    lines = commands.splitlines()
    with contextlib.ExitStack() as running:

        def typed(text: str) -> str:
            for word, here in words.items():
                text = text.replace(word, here)
            return text

        def ready(config: str, *command: str) -> str:
            (tmp_path / command[-1]).write_text(config)
            line = running.enter_context(process(tmp_path, *command))
            assert line.startswith("ready "), line
            return line.split()[1]

        assert lines.pop(0).startswith("ff fs manager manager.toml")
        words["10.0.0.1:7000"] = ready(typed(manager_toml), "manager", "manager.toml")
        where = typed(lines.pop(0))
        shown: list[str] = []
        for line in lines:
            if line.startswith("ff fs storage --make-targets"):
                for node in (7, 8):  # two replicas want two machines
                    config = "root_disk = true\n" + typed(storage_toml).replace("/disk", f"{tmp_path}/disk{node}-")
                    config = re.sub(r"\b7(00\d)?$", rf"{node}\1", config, flags=re.MULTILINE)
                    (tmp_path / f"disk{node}-1").mkdir()
                    (tmp_path / f"disk{node}-2").mkdir()
                    ready(config, "storage", "--make-targets", f"storage-{node}.toml")
                continue
            shown.append(shell.run("sh", "-c", f"{where}\n{typed(line)}"))
            if "register-node" in line:
                other = typed(line).replace("--node 7", "--node 8").replace("--target 700", "--target 800")
                shell.run("sh", "-c", f"{where}\n{other}")
        assert "hello\n" in shown
        assert shell.run("sh", "-c", f"{where}\nff fs ls $W /").split() == ["hello", "home"]


@contextlib.contextmanager
def process(directory: Path, *command: str) -> Iterator[str]:
    """The line that it prints when it serves."""
    words = [sys.executable, "-P", "-m", "fireflyer", "fs", *command]
    with subprocess.Popen(words, cwd=directory, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            yield started.stdout.readline()
        finally:
            started.terminate()
