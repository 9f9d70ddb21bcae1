"""What is laid out by hand and not by msgspec: keys of stores, proofs, frames, files, names of files.

Each case gives the text or bytes that the code makes of fixed arguments. A `dict` is for people: a line for each name.
A case may write into the empty directory that it is given.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import lmdb
import msgspec
from tests.support.collectives.thread_ranks import together

from fireflyer.accounts import rows as account_rows
from fireflyer.base.launch import RankEnvironment
from fireflyer.base.units import SECOND
from fireflyer.checkpoint.core import effects, manifest, names
from fireflyer.checkpoint.core.manager import SaveMachine, Settings
from fireflyer.checkpoint.core.safetensors import TensorSpec, build_header, encode_entries, place
from fireflyer.collectives import Communicator
from fireflyer.collectives.flight import dump as flight
from fireflyer.collectives.planning.plan import make_plan
from fireflyer.data.recordset_writer import RecordSetWriter
from fireflyer.fs.core import capability
from fireflyer.fs.core import rows as manager_rows
from fireflyer.fs.core.meta import open_rows, replies, tables
from fireflyer.fs.core.meta.open_files import write_grants
from fireflyer.fs.schema import meta
from fireflyer.fs.schema.manager import NewChain
from fireflyer.fs.service.local import layout
from fireflyer.fs.service.meta import inode_ids, registry
from fireflyer.fs.service.meta.offline_store import dump_store
from fireflyer.fs.tools.partial import Owner, Partial
from fireflyer.identity.handshake import (
    Accepts,
    ClientHandshake,
    Credential,
    NodeCredential,
    ServerHandshake,
    UserCredential,
    UserKey,
    pack_message,
    token_key,
)
from fireflyer.identity.secrets import Secret
from fireflyer.identity.tokens import TokenStore
from fireflyer.kvstore import MemoryEngine, Transaction
from fireflyer.kvstore.core.keys import KeyRange
from fireflyer.kvstore.core.overlay import Mutations
from fireflyer.kvstore.core.rows import Kind, encode_row
from fireflyer.kvstore.journal import LARGE_NAME, NAME, Journal
from fireflyer.kvstore.lmdb_file import LmdbFile
from fireflyer.kvstore.postgres import DEFAULT_TABLE
from fireflyer.runtime.framing import FrameSealer, frame_keys
from fireflyer.runtime.store import LocalStore

__all__ = ["CASES", "Found"]

Found = bytes | str | Mapping[str, bytes | str]

_SECRET: Final = Secret(bytes(range(32)))
_TOKEN: Final = "fft1.id.secret"


async def _nobody(_token_id: str) -> UserKey | None:
    return None


def _conversation(credential: Credential, role: str) -> Found:
    """Every message of a handshake, and the key of the session."""
    user = UserKey("ada", token_key(_TOKEN))
    client = ClientHandshake(credential, purpose="fs data", nonce=b"c" * 32)
    accepts = Accepts(_SECRET, _nobody)
    server = ServerHandshake(accepts, identity="fs node 3", purpose="fs data", nonce=b"s" * 32)
    hello = client.hello()
    challenge = server.on_hello(hello) or server.on_found(user)
    proof = client.on_challenge(challenge)
    session, verdict = server.on_proof(proof)
    assert client.on_verdict(verdict).key == session.key
    assert session.role == role
    sent = {"hello": hello, "challenge": challenge, "proof": proof, "verdict": verdict}
    return {name: pack_message(message) for name, message in sent.items()} | {"session key": session.key}


def _frames(_: Path) -> Found:
    keys = frame_keys(bytes(32))
    sealer = FrameSealer(keys[0])
    frames = [b"".join(sealer.seal(payload)) for payload in (b"one", b"")]
    return {"to server": keys[0], "to client": keys[1], "first frame": frames[0], "second frame": frames[1]}


def _capability(_: Path) -> Found:
    key = capability.derive_key(_SECRET.reveal(), 7)
    granted = capability.Capability(7, "ada", 5, 11, 12, 3, 1_000_000)
    return {"key": key, "token": capability.sign(granted, key)}


def _token(directory: Path) -> Found:
    store = TokenStore(str(directory / "tokens.json"))
    store.create_user("ada", 0)
    return {"mark": store.issue("ada", 0).split(".")[0], "key": token_key(_TOKEN)}


def _manager_keys(_: Path) -> Found:
    kinds: dict[str, Kind[Any]] = {
        "node": manager_rows.NODES,
        "target": manager_rows.TARGETS,
        "chain": manager_rows.CHAINS,
        "table": manager_rows.TABLES,
        "session": manager_rows.SESSIONS,
        "move": manager_rows.MOVES,
    }
    keys: dict[str, bytes | str] = {name: kind.key(0x1234) for name, kind in kinds.items()}
    keys |= {"lease": manager_rows.LEASE_KEY, "state": manager_rows.STATE_KEY}
    return {**keys, "row": encode_row(manager_rows.NodeRow(3, 4, "a:1"))}


def _account_keys(_: Path) -> Found:
    token = account_rows.TokenRow("0123", "ada", bytes(32), "laptop", 7, 9, "run")
    return {
        "state": account_rows.STATE_KEY,
        "user": account_rows.user_key("ada"),
        "uid": account_rows.uid_key(0x1234),
        "token": account_rows.token_key("0123"),
        "token of a run, of a user": account_rows.owned_key(token),
        "token of a user": account_rows.owned_key(msgspec.structs.replace(token, scope="user", expires_s=None)),
        "row": encode_row(token),
    }


def _meta_keys(_: Path) -> Found:
    numbered = {
        "area": tables.AREAS,
        "locks": tables.LOCKS,
        "client": open_rows.CLIENTS,
        "cut": open_rows.CUTS,
        "grant": write_grants.GRANTS,
    }
    paired = {
        "trash": tables.TRASH,
        "unlinked": tables.UNLINKED,
        "writer": tables.WRITERS,
        "hold": tables.HOLDS,
        "wait": open_rows.WAITS,
    }
    keys: dict[str, bytes | str] = {
        "inode": tables.inode_key(5),
        "entry": tables.entry_key(5, b"name"),
        "end of entries": tables.entries_end(5),
        "values": tables.VALUES,
        "reply": replies._floor_key(9),
        "ids": inode_ids.KEY,
        "services": registry.PREFIX,
        "trash clock": tables.TRASH_CLOCK_KEY,
        "collector": open_rows.LEASE_KEY,
        "generation": open_rows.GENERATION_KEY,
    }
    keys |= {name: tables.number_key(prefix, 5) for name, prefix in numbered.items()}
    keys |= {name: tables.pair_key(prefix, 5, 6) for name, prefix in paired.items()}
    keys["row"] = tables.TRASH_CLOCK_ROWS.encode(tables.TrashClockRow(7))
    keys["sign of a request"] = replies.digest_of(meta.GetSpace(7), meta.Actor(1, 2, (3,)))
    return keys


def _stored_answer(_: Path) -> Found:
    """All rows that an answer leaves."""
    engine = MemoryEngine()

    async def body(rows: Transaction) -> None:
        await replies.store_answer(rows, 9, 70, 70, meta.Done(), b"12345678")

    async def run() -> Found:
        await engine.transact(body)
        page = await engine.read(lambda rows: rows.get_range(b"", None, limit=10))
        return {key.hex(): value for key, value in page.items}

    return asyncio.run(run())


def _meta_dump(_: Path) -> Found:
    async def body(rows: Transaction) -> None:
        rows.set(tables.inode_key(1), b"\x01row")
        rows.set(manager_rows.NODES.key(2), b"\x01node")

    async def run() -> Found:
        engine, file = MemoryEngine(), io.BytesIO()
        await engine.transact(body)
        await dump_store(engine, file)
        return file.getvalue()

    return asyncio.run(run())


def _journal(directory: Path) -> Found:
    """Its blocks without the zeros behind what is written."""
    journal = Journal(str(directory), segment_bytes=64 << 10)
    journal.switch(b"pages")
    batch = [Mutations((KeyRange(b"a", b"b"),), ((b"k", b"v"), (b"l", None)))]
    journal.append(7, journal.encode(batch))
    journal.append(8, b"x" * (70 << 10))
    journal.undo(8)
    journal.close()
    large = hashlib.sha256((directory / LARGE_NAME).read_bytes()).hexdigest()
    return {NAME: _blocks((directory / NAME).read_bytes()), LARGE_NAME: large}


def _blocks(data: bytes) -> str:
    found = {at: data[at : at + 4096].rstrip(b"\0") for at in range(0, len(data), 4096)}
    return " ".join(f"{at}:{block.hex()}" for at, block in found.items() if block)


def _embedded(directory: Path) -> Found:
    """Tables and rows of an embedded store."""
    file = LmdbFile(str(directory / "store"))
    file.write(3, [Mutations((), ((b"key", b"value"),))])
    file.close()
    found: dict[str, bytes | str] = {path.name: "" for path in _files(directory / "store")}
    with lmdb.open(str(directory / "store"), max_dbs=4, readonly=True, lock=False) as environment:
        with environment.begin() as root:
            names = [name for name, _ in root.cursor()]
        for name in names:
            table = environment.open_db(name, create=False)
            with environment.begin(table) as rows:
                found |= {f"{name.decode()} {key.decode()}": value for key, value in rows.cursor()}
    return found


def _recordset(directory: Path) -> Found:
    with RecordSetWriter(str(directory), shard_bytes=4096, meta={"a": 1}) as writer:
        writer.add(b"first")
        writer.add(b"second record")
        writer.add(b"x" * 4000)
    return {path.name: path.read_bytes() for path in _files(directory) if path.stat().st_size < 2000}


def _checkpoint_files(_: Path) -> Found:
    specs = [TensorSpec("w", "F32", (2, 3)), TensorSpec("b", "BF16", (3,))]
    header = build_header(encode_entries(place(specs)), {"step": "7"})
    record = manifest.ShardRecord(0, names.shard_name(0, 1), len(header) + 30, len(header), 1, 2, ())
    whole = manifest.Manifest(1, 7, 0, 1, (record,), {"lr": 0.5}, {"collectives": {}})
    return {
        "header": header,
        names.MANIFEST_FILE: manifest.encode_manifest(whole),
        names.JOB_FILE: manifest.encode_job_plan({"a": [1]}),
        "committed": names.final_name(120, []),
        "committed again": names.final_name(120, ["step-00000120"]),
        "temporary": names.temporary_name(120, 3, 7, "9f86d081"),
        "trash": names.trash_name("step-00000120", []),
    }


def _checkpoint_keys(_: Path) -> Found:
    """The keys of the store over which two ranks save."""
    settings: dict[str, Any] = {
        "world_size": 2,
        "attempt": 3,
        "keep": 1,
        "prefix": "attempt-3/checkpoint",
        "timeout_ns": 1,
    }
    machines = [
        SaveMachine(Settings(rank=rank, **settings), step=7, sequence=4, values={}, forget_from=3) for rank in (0, 1)
    ]
    store: dict[str, bytes] = {}
    used: dict[str, bytes | str] = {}

    def perform(rank: int, effect: effects.Effect) -> effects.Event | None:
        match effect:
            case effects.WriteShard(_, file):
                return effects.ShardWritten(manifest.ShardRecord(rank, file, 8, 8, 1, 2, ()))
            case effects.Publish(key, payload):
                store[key] = payload
                used[f"rank {rank} sets {key}"] = payload if b"{" not in payload else payload.decode()
            case effects.Await(key):
                used[f"rank {rank} reads {key}"] = ""
                return effects.KeyReceived(store[key]) if key in store else None
            case effects.Commit():
                return effects.Committed("step-00000007")
            case effects.Listing():
                return effects.Listed(("step-00000007",))
            case effects.Forget(prefix):
                used[f"rank {rank} deletes {prefix}"] = ""
        return effects.Done()

    wanted = [machine.handle(0, effects.Begin()) for machine in machines]
    for _turn in range(100):
        for rank, machine in enumerate(machines):
            if wanted[rank] and (event := perform(rank, wanted[rank][0])) is not None:
                wanted[rank] = machine.handle(0, event)
    assert not any(wanted)
    return used


class _Watched(LocalStore):
    """Notes the keys that are used."""

    def __init__(self) -> None:
        super().__init__()
        self.used: dict[str, None] = {}

    def note(self, key: str) -> None:
        self.used[re.sub(r"(?<=/)[0-9a-f]{32}", "UID", key)] = None

    def set(self, key: str, value: bytes) -> None:
        self.note(key)
        super().set(key, value)

    def set_if_missing(self, key: str, value: bytes) -> bytes:
        self.note(key)
        return super().set_if_missing(key, value)

    def add(self, key: str, amount: int) -> int:
        self.note(key)
        return super().add(key, amount)

    def wait(self, keys: list[str], timeout_ns: int) -> None:
        for key in keys:
            self.note(key)
        super().wait(keys, timeout_ns)

    def keys(self, prefix: str) -> list[str]:
        self.note(prefix)
        return super().keys(prefix)

    def try_get(self, key: str) -> bytes | None:
        self.note(key)
        return super().try_get(key)

    def delete_prefix(self, prefix: str) -> int:
        self.note(prefix)
        return super().delete_prefix(prefix)


def _group_keys(_: Path) -> Found:
    """The keys of the store over which a group is made and made again."""
    store = _Watched()

    def body(first: Communicator) -> None:
        with first.reform(store) as second:
            second.barrier()

    ends = together([0, 0, 1], body, store=store, arena_bytes=1 << 20, join_timeout_ns=60 * SECOND)
    assert ends == [None] * 3
    return {"keys": "\n".join(sorted(store.used))}


def _environment(_: Path) -> Found:
    """What a rank is told, and that it reads what it was told."""
    told = RankEnvironment(
        rank=3, world_size=6, local_rank=1, local_world_size=2, node=1, nodes=3, master_addr="m", master_port=4,
        attempt=5, max_restarts=6, job="j", control="c:1", secret_file="s", run_dir="r", tune=True, pin=False,
        peer_memory=False, transport="ucx", dumps="d",
    )  # fmt: skip
    assert RankEnvironment.from_mapping(told.to_mapping()) == told
    return dict(told.to_mapping())


def _local_cluster(directory: Path) -> Found:
    """Every file of a cluster on one machine; what is secret and who made it are left out."""
    files = layout.Layout(str(directory / "fs"))
    cluster = layout.LocalCluster(
        cluster="fs-1",
        replicas=1,
        store="",
        durable=False,
        failure_timeout_ms=1000,
        nodes=(layout.LocalNode(1, (1001,)),),
        chains=(NewChain(1, (1001,)),),
        managers=("127.0.0.1:1",),
    )
    files.make_directory()
    files.save(cluster)
    files.make_secret()
    files.write_admin_token("fft1.0123.secret")
    files.write_manager(cluster, 1, "127.0.0.1:0")
    files.write_storage(cluster, cluster.nodes[0])
    found: dict[str, bytes | str] = {}
    for path in sorted((directory / "fs").rglob("*")):
        shown = path.suffix == ".toml" or path.name == "cluster.json"
        text = path.read_text().replace(str(directory), "DIRECTORY") if shown else ""
        found[str(path.relative_to(directory))] = re.sub(r"(root_[ug]id) = [0-9]+", r"\1 = 0", text)
    return found


def _names(_: Path) -> Found:
    return {
        "digest of a plan": flight.plan_digest(make_plan((0, 1))),
        "table of PostgreSQL": DEFAULT_TABLE,
        "refused sessions": f"{replies.SESSION_OVER} {replies.SESSION_EVICTED} {replies.SESSION_FORGOTTEN}",
        "partial copy": Partial("0" * 24, Owner("01234567", 3, 4), 5).name,
    }


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if stat.S_ISREG(os.lstat(path).st_mode))


CASES: Final[dict[str, Callable[[Path], Found]]] = {
    "handshake.node": lambda _: _conversation(NodeCredential(_SECRET, "fs node 4"), "node"),
    "handshake.user": lambda _: _conversation(UserCredential(_TOKEN), "user"),
    "rpc.frames": _frames,
    "identity.token": _token,
    "fs.capability": _capability,
    "accounts.keys": _account_keys,
    "fs.manager.keys": _manager_keys,
    "fs.meta.keys": _meta_keys,
    "fs.meta.stored-answer": _stored_answer,
    "fs.meta.dump": _meta_dump,
    "kvstore.journal": _journal,
    "kvstore.embedded": _embedded,
    "data.recordset": _recordset,
    "checkpoint.files": _checkpoint_files,
    "checkpoint.keys": _checkpoint_keys,
    "collectives.keys": _group_keys,
    "job.environment": _environment,
    "fs.local.files": _local_cluster,
    "names": _names,
}
