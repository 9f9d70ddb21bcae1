"""At most one process of a node on a machine, whatever directories it was given.

A registration from the same machine says that the process before it is dead (its roles are given away at once). Who
holds the directories' locks has shown that for those directories; a second process of the node with directories of its
own would take the roles from a living one. So the node's name is held too: an abstract socket, which the kernel gives
up with its process, and whose name nobody can guess, and so take, who does not have the secret.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import socket

from fireflyer.base.errors import Busy
from fireflyer.base.os_errors import translate_os_error
from fireflyer.fs.schema.ids import NodeId
from fireflyer.identity.secrets import Secret

__all__ = ["hold_node"]


def hold_node(secret: Secret, cluster: str, node: NodeId) -> socket.socket:
    """Held until it is closed, or the process ends. Raises `Busy` while another process on this machine has the node.

    In this network namespace: elsewhere abstract names are others.
    """
    words = f"fireflyer storage node {node} of {cluster}".encode()
    name = hmac.new(secret.reveal(), words, hashlib.sha256).hexdigest()
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        held.bind(f"\0fireflyer-{name}")
    except OSError as error:
        held.close()
        if error.errno != errno.EADDRINUSE:
            raise translate_os_error(error, f"hold the name of node {node}") from error
        raise Busy(f"another process on this machine runs node {node} of cluster {cluster!r}; stop it first") from None
    return held
