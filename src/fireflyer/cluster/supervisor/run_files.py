"""Small files of the run directory on a machine that does not share it.

Those that the launcher has are fetched before ranks start: the declared topology, and the plans of the job's first
start, which a later attempt must use on whichever machine. What ranks write (plans, dumps of flight recorders) is sent
to the launcher soon after, and at the latest when an attempt has ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil

from fireflyer.base.errors import FireflyerError
from fireflyer.base.launch import DUMPS_NAME, PLANS_NAME
from fireflyer.base.units import SECOND
from fireflyer.cluster.schema.wire import FETCH_FILES, KEEP_FILE, MAX_RUN_FILE_BYTES, Done, RunFile
from fireflyer.runtime.rpc import RpcClient

__all__ = ["RunFileCopies"]

_log = logging.getLogger(__name__)
_CALL_NS = 60 * SECOND
_NAME = re.compile(r"[A-Za-z0-9%._~-]+")


class RunFileCopies:
    def __init__(self, client: RpcClient, run_dir: str) -> None:
        self._client = client
        self._run_dir = run_dir
        self._kept: dict[str, tuple[int, int]] = {}
        """Name: size and time of change of what the launcher has."""
        self._left = False
        self._keeping = asyncio.Lock()
        """Who finds that the launcher has a file must not be told so before it does."""

    async def fetch(self) -> None:
        """Raises `FireflyerError`, `OSError`."""
        answer = await self._client.call(FETCH_FILES, Done(), _CALL_NS)
        for file in answer.files:
            await asyncio.to_thread(self._write, file)

    def _write(self, file: RunFile) -> None:
        path = os.path.join(self._run_dir, file.name)
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(f"{path}.part", "wb") as part:
            part.write(file.data)
        os.replace(f"{path}.part", path)
        status = os.stat(path)
        self._kept[file.name] = (status.st_size, status.st_mtime_ns)

    async def keep(self) -> None:
        """Sends what is new or has changed. A file that cannot be sent is named in the log, once in each state."""
        async with self._keeping:
            await self._keep_all()

    async def _keep_all(self) -> None:
        for directory in (PLANS_NAME, DUMPS_NAME):
            try:
                names = sorted(os.listdir(os.path.join(self._run_dir, directory)))
            except OSError:
                continue
            for name in names:
                if _NAME.fullmatch(name) and not name.endswith(".part"):
                    await self._keep(f"{directory}/{name}")

    async def _keep(self, name: str) -> None:
        try:
            data = await asyncio.to_thread(self._changed, name)
            if data is not None:
                await self._client.call(KEEP_FILE, RunFile(name, data), _CALL_NS)
        except (FireflyerError, OSError) as error:
            self._left = True
            _log.warning("file stays on this machine file=%s/%s reason=%s", self._run_dir, name, error)

    def _changed(self, name: str) -> bytes | None:
        """Its content, None where the launcher has it already or it is too large."""
        path = os.path.join(self._run_dir, name)
        status = os.stat(path)
        state = (status.st_size, status.st_mtime_ns)
        if self._kept.get(name) == state:
            return None
        self._kept[name] = state
        if status.st_size > MAX_RUN_FILE_BYTES:
            self._left = True
            _log.warning("file stays on this machine, it is too large to send file=%s", path)
            return None
        with open(path, "rb") as file:
            return file.read(MAX_RUN_FILE_BYTES)

    def remove(self) -> None:
        """The job has ended, and the launcher has all: nothing stays here, unless a file could not be sent."""
        if not self._left:
            shutil.rmtree(self._run_dir, ignore_errors=True)
