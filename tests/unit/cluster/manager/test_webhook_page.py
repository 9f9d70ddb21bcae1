"""docs/how-to/notifications.md: its receiver accepts what a manager sends, and nothing else."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from fireflyer.cli.platform.webhooks import webhook_command
from fireflyer.cluster.manager.webhooks import WebhookSender, signature

PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "notifications.md"


async def nobody(_: str) -> tuple[str, ...] | None:
    return None


def test_the_receiver_of_the_page_verifies_what_is_sent() -> None:
    names: dict[str, Any] = {}
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(code, names)
    sender = WebhookSender(b"k" * 32, (), nobody)
    secret, now_s, body = sender.secret_of("ada", b"nonce"), int(time.time()), b'{"type": "test"}'
    signed = signature(sender._secret("ada", b"nonce"), "msg_1", now_s, body)
    headers = {"webhook-id": "msg_1", "webhook-timestamp": str(now_s), "webhook-signature": signed}
    assert names["verify"](secret, headers, body)
    assert not names["verify"](secret, headers, body + b" ")
    assert not names["verify"](sender.secret_of("bob", b"nonce"), headers, body)
    assert not names["verify"](secret, {**headers, "webhook-id": "msg_2"}, body)
    assert not names["verify"](secret, {**headers, "webhook-timestamp": str(now_s - 301)}, body)


def test_the_commands_of_the_page_are_there() -> None:
    used = set(re.findall(r"ff webhook ([a-z]+)", PAGE.read_text()))
    assert used == set(webhook_command.commands)
