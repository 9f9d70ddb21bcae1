"""Sends what webhooks are told, signed as the specification "Standard Webhooks" says, so that its libraries verify it:

    webhook-id         of the event, the same in each attempt
    webhook-timestamp  Unix seconds of this attempt
    webhook-signature  v1,BASE64(HMAC-SHA256(secret, id + "." + timestamp + "." + body))

A secret is computed from a key that all managers have and from what the webhook's row draws at random: no row and no
backup has it. Only the leader sends (`core.platform.webhooks`).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.cluster.core.platform.access import is_operator
from fireflyer.cluster.core.platform.webhooks import Deliver, Delivered
from fireflyer.cluster.manager.webhook_http import Networks, parse_target, post_to

__all__ = ["SECRET_MARK", "WebhookSender", "signature"]

SECRET_MARK: Final = "whsec_"  # noqa: S105
"""Before the secret in base64."""
_USER_AGENT: Final = "fireflyer-webhooks/1"


def signature(secret: bytes, event_id: str, timestamp: int, body: bytes) -> str:
    words = f"{event_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(secret, words, "sha256")).decode()


class WebhookSender:
    def __init__(
        self, key: bytes, networks: tuple[str, ...], roles_of: Callable[[str], Awaitable[tuple[str, ...] | None]]
    ) -> None:
        """`key`: 32 bytes that the managers of the cluster share. `roles_of`: a user's; None where there is none."""
        self._key = hashlib.blake2b(b"fireflyer webhooks", key=key, digest_size=32).digest()
        self._networks: Networks = tuple(ipaddress.ip_network(network) for network in networks)
        self._roles_of = roles_of
        self._tasks: set[asyncio.Task[None]] = set()

    def check(self, url: str) -> None:
        """Raises `UsageError`. Names are resolved when something is sent."""
        parse_target(url, self._networks)

    def secret_of(self, user: str, nonce: bytes) -> str:
        """As it is shown."""
        return SECRET_MARK + base64.b64encode(self._secret(user, nonce)).decode()

    def _secret(self, user: str, nonce: bytes) -> bytes:
        return hmac.digest(self._key, len(nonce).to_bytes(2, "big") + nonce + user.encode(), "sha256")

    def deliver(self, order: Deliver, answer: Callable[[Delivered], None]) -> None:
        """`answer` is called once, unless `stop` comes first."""
        task = asyncio.get_running_loop().create_task(self._deliver(order, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """This manager leads no longer: the next one sends."""
        for task in self._tasks:
            task.cancel()

    async def _deliver(self, order: Deliver, answer: Callable[[Delivered], None]) -> None:
        ok, final = False, False
        try:
            roles = await self._roles_of(order.user)
            if roles is None or (order.for_operator and not is_operator(roles)):
                text, final = (
                    f"not sent: {order.user} is {'no user' if roles is None else 'no operator'} any more",
                    True,
                )
            else:
                status = await self._post(order)
                ok = HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES
                moved = HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST
                text = f"answered {status}{'; redirects are not followed' if moved else ''}"
        except UsageError as error:
            text = f"refused: {error.message}"
        except FireflyerError as error:
            text = error.message
        answer(Delivered(webhook=order.webhook, number=order.number, ok=ok, text=text, final=final))

    async def _post(self, order: Deliver) -> int:
        now_s = int(time.time())
        headers = {
            "Content-Type": "application/json",
            "User-Agent": _USER_AGENT,
            "webhook-id": order.event_id,
            "webhook-timestamp": str(now_s),
            "webhook-signature": signature(self._secret(order.user, order.nonce), order.event_id, now_s, order.body),
        }
        return await post_to(order.url, headers, order.body, self._networks)
