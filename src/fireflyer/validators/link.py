"""Asks whether something listens at addresses of other nodes."""

from __future__ import annotations

import os
import socket
from typing import Final

from fireflyer.base.errors import FireflyerError
from fireflyer.runtime.address import Address
from fireflyer.validators.core.evidence import PeerTest

__all__ = ["connect_to"]

_LIMIT_S: Final = 5.0


def connect_to(address: str) -> PeerTest:
    """`address`: HOST:PORT. Only a TCP connection is made; nothing is said."""
    try:
        to = Address.parse(address)
        with socket.create_connection((to.host, to.port), _LIMIT_S):
            return PeerTest(address)
    except ConnectionRefusedError:  # nobody listens there any more, but the node has answered
        return PeerTest(address)
    except TimeoutError:
        return PeerTest(address, f"no answer within {_LIMIT_S:g} s")
    except OSError as error:
        return PeerTest(address, os.strerror(error.errno) if error.errno else str(error))
    except FireflyerError as error:
        return PeerTest(address, str(error))
