"""What a process tells systemd: sd_notify(3)."""

from __future__ import annotations

import logging
import os
import socket

__all__ = ["ServiceManager"]

_log = logging.getLogger(__name__)


class ServiceManager:
    """Service manager that started this process, if one wants to be told: `NOTIFY_SOCKET`, which is taken out of the
    environment, so that children do not speak for this process."""

    def __init__(self) -> None:
        self._path = os.environ.pop("NOTIFY_SOCKET", "")

    def ready(self) -> None:
        """Tell that this process serves. Raises nothing: what cannot be told is logged."""
        if not self._path:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
                notify.connect("\0" + self._path[1:] if self._path.startswith("@") else self._path)
                notify.send(b"READY=1")
        except OSError as error:
            _log.warning("systemd was not told that this process serves reason=%s", error)
