"""Routing: which targets hold which chains, in which state and order, and where their nodes are reached."""

from __future__ import annotations

import enum
from typing import Annotated, Final

import msgspec

from fireflyer.fs.schema.ids import ChainId, ChainVersion, Incarnation, NodeId, RoutingVersion, TableId, TargetId

__all__ = ["MAX_REPLICAS", "Address", "Chain", "ChainTable", "Member", "Node", "Routing", "RoutingDelta", "TargetState"]

MAX_REPLICAS: Final = 16

Address = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
"""host:port"""


class TargetState(enum.StrEnum):
    """What the manager lets a target do."""

    SERVING = "serving"
    """Reads, and updates in its place of the chain."""
    LASTSRV = "lastsrv"
    """Was serving when the last of its chain was lost, so it has every acknowledged update: any may come back."""
    SYNCING = "syncing"
    """Takes updates from its predecessor while the rest is copied to it; no reads."""
    WAITING = "waiting"
    """There, but nobody can or may sync it now."""
    OFFLINE = "offline"


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A target in a chain."""

    target: TargetId
    node: NodeId
    state: TargetState


class Chain(msgspec.Struct, frozen=True):
    """Members in the order of the chain: serving ones first, head in front; then lastsrv, syncing, waiting, offline."""

    id: ChainId
    version: ChainVersion
    members: Annotated[tuple[Member, ...], msgspec.Meta(min_length=1, max_length=MAX_REPLICAS)]
    restored: bool = False
    """Its states are those of a dump that was loaded: nobody serves until it is known who served last."""


class Node(msgspec.Struct, frozen=True):
    """A storage node as it last registered. `address`: host:port of its data connections."""

    id: NodeId
    address: Address
    incarnation: Incarnation


class ChainTable(msgspec.Struct, frozen=True):
    """Numbers chains: place `i` of the table is chain `chains[i]`. A file's layout names a table and places in it."""

    id: TableId
    chains: tuple[ChainId, ...]


class Routing(msgspec.Struct, frozen=True):
    """All of it, sorted by id. A higher version replaces a lower one as a whole."""

    version: RoutingVersion
    nodes: tuple[Node, ...] = ()
    chains: tuple[Chain, ...] = ()
    tables: tuple[ChainTable, ...] = ()


class RoutingDelta(msgspec.Struct, frozen=True):
    """What changed after version `base`; from 0 it is all of it. `fireflyer.fs.core.routing.apply_delta` applies it."""

    base: RoutingVersion
    version: RoutingVersion
    nodes: tuple[Node, ...] = ()
    chains: tuple[Chain, ...] = ()
    tables: tuple[ChainTable, ...] = ()
    removed_nodes: tuple[NodeId, ...] = ()
