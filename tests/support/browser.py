"""A headless Chromium for pages that must not only be written but also rendered."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

__all__ = ["dump_dom", "find_browser"]

TIMEOUT_S = 90


def find_browser() -> str | None:
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


def dump_dom(browser: str, page: Path, profile: Path) -> tuple[str, str]:
    """`(DOM after rendering, what the console said)`. `profile` is a directory that does not exist yet."""
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={profile}",
        "--enable-logging=stderr",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, "\n".join(console)
