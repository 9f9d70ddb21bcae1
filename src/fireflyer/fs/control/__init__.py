"""The way to the cluster manager, for all who ask it: one RPC method, one connection per manager. And `META`, the
method of the meta service.

`ManagerClient` awaits an answer of the primary, for clients and commands. `ControlClient` carries the `Ask` effects of
a machine that decides itself whom it asks, and when again.
"""

from fireflyer.fs.control.client import ControlClient
from fireflyer.fs.control.connections import ASK, META, ConnectionPool
from fireflyer.fs.control.primary import ManagerClient

__all__ = ["ASK", "META", "ConnectionPool", "ControlClient", "ManagerClient"]
