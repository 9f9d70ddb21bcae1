"""The way to the cluster manager, for all who ask it: one RPC method, one connection per manager.

`ManagerClient` awaits an answer of the primary, for clients and commands. `ControlClient` carries the `Ask` effects of
a machine that decides itself whom it asks, and when again.
"""

from fireflyer.fs.control.asking import ControlClient
from fireflyer.fs.control.lines import ASK, Lines
from fireflyer.fs.control.primary import ManagerClient

__all__ = ["ASK", "ControlClient", "Lines", "ManagerClient"]
