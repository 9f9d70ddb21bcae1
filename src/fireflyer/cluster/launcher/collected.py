"""What machines that do not share the run directory send for it: rank logs, plans, dumps."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable

from fireflyer.base.errors import UsageError
from fireflyer.base.launch import PLANS_NAME, TOPOLOGY_NAME
from fireflyer.base.os_errors import translate_os_error
from fireflyer.cluster.schema.wire import MAX_RUN_FILE_BYTES, RunFile, RunFiles
from fireflyer.runtime.log_writer import LogFile, LogLimit, LogWriter

__all__ = ["CollectedFiles", "CollectedLogs"]

_MAX_FILES = 100_000


class CollectedLogs:
    """`write` waits while much is waiting for the disk, which holds up the senders."""

    def __init__(
        self,
        path_of: Callable[[str], str],
        *,
        on_error: Callable[[str], None],
        logs_dir: str = "",
        most_bytes: int = 0,
    ) -> None:
        """`path_of` a name, as in `LogBytes`; raises `UsageError` where no such file was asked for. `most_bytes` are
        kept below `logs_dir`; 0: all."""
        self._path_of = path_of
        self._logs_dir, self._most_bytes = logs_dir, most_bytes
        self._on_error = on_error
        self._files: dict[str, LogFile] = {}
        self._attempt = ""
        self._room = asyncio.Event()
        self._room.set()
        self._writer: LogWriter | None = None

    async def write(self, name: str, data: bytes) -> None:
        """`name`: as in `LogBytes`, which has checked it. Files of one attempt are open at a time."""
        await self._room.wait()
        attempt = name.partition("/")[0]
        if attempt != self._attempt:
            self._end_attempt()
            self._attempt = attempt
        if self._writer is None:
            limit = LogLimit(self._logs_dir, self._most_bytes) if self._most_bytes else None
            self._writer = LogWriter(
                full=self._room.clear, free=self._room.set, on_log_error=self._on_error, limit=limit
            )
        file = self._files.get(name)
        if file is None:
            path = self._path_of(name)
            try:
                file = self._files[name] = LogFile(path)
            except OSError as error:
                self._on_error(str(translate_os_error(error, f"write {path}")))
                return
        self._writer.write(file, data)

    def _end_attempt(self) -> None:
        if self._writer is not None:
            for file in self._files.values():
                self._writer.close(file)
        self._files.clear()

    async def close(self) -> None:
        self._end_attempt()
        if self._writer is not None:
            await self._writer.drained()
            self._writer.stop()
            self._writer = None


class CollectedFiles:
    """Small files of the run directory `run_dir`. Blocks; called by threads."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._count = 0

    def all_plans(self) -> RunFiles:
        """What a machine needs before ranks start there: the declared topology and the plans that groups keep. Raises
        `FireflyerError`."""
        plans = os.path.join(self._run_dir, PLANS_NAME)
        names = [TOPOLOGY_NAME]
        if os.path.isdir(plans):
            names += [f"{PLANS_NAME}/{name}" for name in sorted(os.listdir(plans)) if name.endswith(".json")]
        return RunFiles(tuple(file for name in names if (file := self._read(name)) is not None))

    def _read(self, name: str) -> RunFile | None:
        path = os.path.join(self._run_dir, name)
        try:
            with open(path, "rb") as file:
                return RunFile(name, file.read(MAX_RUN_FILE_BYTES))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise translate_os_error(error, f"read {path}") from error

    def keep(self, file: RunFile) -> None:
        """The name was checked when it was decoded. Raises `FireflyerError`."""
        path = os.path.join(self._run_dir, file.name)
        strange = os.path.basename(file.name) in (".", "..", TOPOLOGY_NAME)
        if strange or self._count >= _MAX_FILES:
            raise UsageError(f"{file.name} is not kept: no file of a run, or there are too many")
        self._count += 1
        part = f"{path}.{secrets.token_hex(4)}.part"
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            with open(part, "wb") as written:
                written.write(file.data)
            os.replace(part, path)
        except OSError as error:
            raise translate_os_error(error, f"write {path}") from error
