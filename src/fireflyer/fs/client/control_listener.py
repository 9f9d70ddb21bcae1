"""What the control says goes to the machine, in the thread of whoever owns it: the half that both faces share."""

from __future__ import annotations

from collections.abc import Mapping

from fireflyer.base.errors import FireflyerError
from fireflyer.fs.client.control.capabilities import Right
from fireflyer.fs.client.dispatch import Dispatch
from fireflyer.fs.schema.ids import ClientId
from fireflyer.fs.schema.routing import Node, Routing

__all__ = ["ControlListener"]


class ControlListener:
    """`fireflyer.fs.client.control.session.ControlEvents`, of the machine of one client."""

    def __init__(self, client: ClientId, dispatch: Dispatch) -> None:
        self.client = client
        """Of the session; another one when it had to be exchanged."""
        self._dispatch = dispatch

    def heard(self) -> None:
        """Something was said: when the machine is due may have changed."""

    def learned(self, routing: Routing) -> None:
        self._dispatch.learned(routing)
        self.heard()

    def confirmed(self, asked_ns: int) -> None:
        self._dispatch.confirmed(asked_ns)
        self.heard()

    def connected(self, node: Node, fd: int) -> None:
        self._dispatch.connected(node, fd)
        self.heard()

    def not_connected(self, node: Node, error: FireflyerError) -> None:
        self._dispatch.not_connected(node, error)
        self.heard()

    def renewed(self, right: Right, capability: bytes) -> None:
        self._dispatch.present(right, capability)
        self.heard()

    def denied(self, right: Right) -> None:
        self._dispatch.forget(right)
        self.heard()

    def over(self, client: ClientId) -> None:
        self._dispatch.over(client)
        self.heard()

    def exchanged(self, client: ClientId, capabilities: Mapping[Right, bytes]) -> None:
        self.client = client
        self._dispatch.exchanged(client, capabilities)
        self.heard()

    def end(self, reason: str) -> None:
        self._dispatch.end(reason)
        self.heard()
