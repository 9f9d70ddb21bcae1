"""The exchange of an expert-parallel layer: its time, overlapped micro-batches, copies by node, help of the network.

Formulas of the DeepSeek-V3 paper: 2.3.2 (time of an output token), 4.3 (node-limited routing), 4.4 (SMs lent to
communication), 6.5 (multicast and aggregation inside the network).
"""

from __future__ import annotations

from typing import NamedTuple

from fireflyer.base.errors import UsageError

__all__ = [
    "DispatchTime",
    "ExchangeBytes",
    "compute_share",
    "exchange_bytes",
    "node_limited_dispatch",
    "token_seconds",
]


class ExchangeBytes(NamedTuple):
    """Bytes that a device sends and receives for each of its tokens, where all devices do the same."""

    dispatch_sent: float
    dispatch_received: float
    combine_sent: float
    combine_received: float

    def seconds(self, tokens: int, bytes_per_s: float, *, at_once: bool = False) -> float:
        """Time of `tokens` over a link with that rate in each direction: dispatch, then combine; `at_once`: one
        micro-batch dispatches while another one combines, and the link carries both in each direction."""
        if at_once:
            busiest = max(self.dispatch_sent + self.combine_sent, self.dispatch_received + self.combine_received)
        else:
            busiest = max(self.dispatch_sent, self.dispatch_received) + max(self.combine_sent, self.combine_received)
        return tokens * busiest / bytes_per_s


def exchange_bytes(
    hidden: int,
    copies: float,
    *,
    dispatch_bytes: float = 1.0,
    combine_bytes: float = 2.0,
    multicast: bool = False,
    aggregation: bool = False,
) -> ExchangeBytes:
    """Bytes of a token that goes to `copies` devices and comes back from them; `dispatch_bytes` and `combine_bytes` of
    one value: FP8 and BF16 by default. `multicast`: the network copies, and a token is sent once; each of its devices
    still receives it. `aggregation`: the network adds, and one result is received; each device still sends its own.
    Raises `UsageError`."""
    if hidden < 1 or not copies >= 1 or not (dispatch_bytes > 0 and combine_bytes > 0):
        raise UsageError(
            f"{copies} copies of {hidden} values of {dispatch_bytes} and {combine_bytes} bytes; use 1 or more copies "
            "and values, and bytes above 0"
        )
    dispatch, combine = hidden * dispatch_bytes, hidden * combine_bytes
    return ExchangeBytes(
        dispatch * (1 if multicast else copies),
        dispatch * copies,
        combine * copies,
        combine * (1 if aggregation else copies),
    )


def token_seconds(layers: int, exchange_s: float, compute_s: float = 0.0, *, overlapped: bool = True) -> float:
    """Seconds of an output token where two micro-batches pass each of `layers`: while one exchanges (`exchange_s`,
    dispatch and combine), the other one computes (`compute_s`), so a layer takes twice the longer of both; not
    `overlapped`: twice their sum. Raises `UsageError`.

    >>> round(token_seconds(61, 120.96e-6) * 1e3, 2)
    14.76
    """
    if layers < 1 or exchange_s < 0 or compute_s < 0:
        raise UsageError(
            f"{layers} layers, {exchange_s} and {compute_s} s; use 1 or more layers, and no negative times"
        )
    return 2 * layers * (max(exchange_s, compute_s) if overlapped else exchange_s + compute_s)


def compute_share(units: int, lent: int) -> float:
    """Share of the rate of a GPU with `units` SMs, of which `lent` move messages: 112/132 of an H800 in training.
    Raises `UsageError`."""
    if not 0 <= lent < units:
        raise UsageError(f"{lent} of {units} SMs are lent to communication; leave 1 or more")
    return 1 - lent / units


class DispatchTime(NamedTuple):
    """Seconds of one token over the network, and over the links inside the nodes."""

    network: float
    inside: float

    @property
    def longest(self) -> float:
        """Both happen at once, token after token."""
        return max(self)


def node_limited_dispatch(
    experts: int, nodes: int | None, token_bytes: float, *, network_bytes_per_s: float, inside_bytes_per_s: float
) -> DispatchTime:
    """Time of a token to `experts` devices in at most `nodes` nodes: it is sent once to each node and forwarded inside
    (M t instead of 8 t); None: sent to each device over the network. All nodes and devices are others than the
    sender's: the worst case. Raises `UsageError`."""
    if experts < 1 or (nodes is not None and nodes < 1):
        raise UsageError(f"{experts} experts on {nodes} nodes; use 1 or more of each")
    if nodes is None:
        return DispatchTime(experts * token_bytes / network_bytes_per_s, 0.0)
    return DispatchTime(
        min(nodes, experts) * token_bytes / network_bytes_per_s, experts * token_bytes / inside_bytes_per_s
    )
