"""What docs/how-to/run-managers.md says, typed literally, on one machine."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.how_to import Shell
from tests.support.kvstore.postgres import PostgresServer
from tests.support.patience import allowed_s

from fireflyer.base.toml_text import to_toml
from fireflyer.cluster.client import Client, Connection
from fireflyer.cluster.manager.config import PlatformConfig

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "run-managers.md"


def config_of(text: str, directory: Path, store: str) -> PlatformConfig:
    """Of the page, but on loopback."""
    here = text.replace("/etc/fireflyer", str(directory)).replace("/shared/fireflyer", str(directory))
    said: dict[str, Any] = tomllib.loads(here)
    config = msgspec.convert(said, PlatformConfig)
    return msgspec.structs.replace(
        config, store=store, directory=str(directory / "manager"), listen="127.0.0.1:0", listen_agents="127.0.0.1:0",
        advertise="", advertise_agents="", managers=(),
    )  # fmt: skip


def test_every_command_does_what_the_page_says(tmp_path: Path, postgres_server: PostgresServer) -> None:
    text = PAGE.read_text()
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (toml,) = [block for language, block in fenced if language == "toml"]
    prepare, first, backup, restore = [block.splitlines() for language, block in fenced if not language]
    shell = Shell(tmp_path)
    tmp_path.chmod(0o700)
    (tmp_path / "manager").mkdir(mode=0o700)
    file = tmp_path / "platform.toml"

    shell.run("sh", "-c", prepare[0])
    file.write_text(to_toml(msgspec.to_builtins(config_of(toml, tmp_path, postgres_server.url()))))
    token = shell.run(*first[0].split()).strip()
    command = [sys.executable, "-P", "-m", "fireflyer", "manager", str(file)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as one:
        try:
            assert one.stdout is not None
            ready, url, *_ = one.stdout.readline().split()
            assert ready == "ready"
            with Client(Connection(url=url, token=token)) as client:
                assert client.whoami().user == "ops"
            for _ in range(int(allowed_s(60))):
                done = subprocess.run(
                    [*command[:-1], *backup[0].split()[2:]], cwd=tmp_path, capture_output=True, text=True, check=False
                )
                if done.returncode == 0:
                    break
                assert "holds no platform" in done.stderr, "it has not led yet"
        finally:
            one.terminate()
    assert (tmp_path / "platform.backup").exists()
    file.write_text(to_toml(msgspec.to_builtins(config_of(toml, tmp_path, postgres_server.url()))))
    assert "rows restored" in shell.run(*restore[0].split())
