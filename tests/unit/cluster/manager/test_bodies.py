"""Bodies of requests: types that Litestar decodes."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import typing
import msgspec
from fireflyer.cluster.manager.web.app import RequestLimits, make_app
from fireflyer.cluster.schema.api import NewUser, Submission
from fireflyer.cluster.schema.webhooks import NewWebhook

make_app(*[object()] * 11, limits=RequestLimits(10, 10), secure=False, version="0")

def evaluated(*_, **__):
    raise AssertionError("the types of a struct are looked at when it is used, and not when the app is made")

typing.ForwardRef._evaluate = evaluated
for kind in (Submission, NewUser, NewWebhook):
    try:
        msgspec.convert({}, kind)
    except msgspec.ValidationError as error:
        print(error)
"""


def test_their_types_are_prepared_before_any_request_comes() -> None:
    """Two threads that use a struct for the first time at once end the process (msgspec 0.22)."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout.count("Object missing required field") == 3, (done.stdout, done.stderr)
