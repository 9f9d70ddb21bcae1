"""One user tries to get at another one's files, by every way there is; nothing of it works, and nothing has changed.

Ada's files are hers alone. Eve has an account, a token, sessions of her own, and knows every number there is: of
inodes, handles, sessions, requests, chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.fs.clusters.data_connection import DataConnection
from tests.support.fs.clusters.local_cluster import LocalCluster
from tests.support.fs.meta_sim.clients import RawClient
from tests.support.fs.mounts.mounting import mounted, needs_fuse
from tests.support.posix.local import LocalPlace
from tests.support.posix.places import NOW, Identity, User, errno_of

import fireflyer.fs
from fireflyer.base.errors import FireflyerError, PermissionDenied
from fireflyer.fs.client.chunks import connect as connect_chunks
from fireflyer.fs.client.files.file_system import FileSystem
from fireflyer.fs.client.files.open_file_table import FileOptions
from fireflyer.fs.client.local import access_of
from fireflyer.fs.control import ManagerClient
from fireflyer.fs.core.capability import Capability, Rights, derive_key, sign
from fireflyer.fs.core.meta.inodes.layout import order_of
from fireflyer.fs.schema import data, meta
from fireflyer.fs.schema.chunks import Change, Found, Operation, Query, QueryKind, RefusalReason, Update
from fireflyer.fs.schema.chunks import Refused as ChunkRefused
from fireflyer.fs.schema.ids import ChunkId
from fireflyer.fs.schema.inodes import ROOT, Defaults, FileDetails
from fireflyer.fs.schema.meta import Actor, ErrorReply, Opened, OpenFlag, PathRef
from fireflyer.fs.schema.sessions import GetCapability
from fireflyer.identity import NodeCredential
from fireflyer.identity.handshake import Credential, UserCredential

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

ADA, EVE = 3001, 3002
SECRET_TEXT = b"what only Ada knows"
HERS = 7001
"""The handle that Ada has open."""
REFUSALS = (errno.EACCES, errno.EPERM)
_NOTES = "/ada-public/notes"
FOUND, DENIED = 1, 6
"""Of reads of chunks."""


@dataclass(frozen=True)
class Scene:
    cluster: LocalCluster
    tokens: dict[str, str]
    directory: int
    """Inode of /ada, which is closed to others."""
    file: int
    """Of /ada/diary."""
    open_file: int
    """Of /ada-public/notes: in an open directory, and itself closed."""

    @property
    def where(self) -> str:
        return f"ff://{self.cluster.directory}"

    def connect(self, name: str) -> FileSystem:
        return fireflyer.fs.connect(self.where, token=self.tokens[name], options=FileOptions(umask=0))

    @property
    def managers(self) -> tuple[str, ...]:
        return access_of(str(self.cluster.directory))[0]

    @property
    def secret(self) -> bytes:
        credential = access_of(str(self.cluster.directory))[1]
        assert isinstance(credential, NodeCredential)
        return credential.secret.reveal()


@pytest.fixture(scope="session")
def scene(whole_session_cluster: LocalCluster) -> Scene:
    """Made once for a cluster: a worker may run other modules between two tests of this one."""
    tokens, cluster = {}, whole_session_cluster
    cluster.wait(cluster.whole)
    for name, uid in (("ada", ADA), ("eve", EVE)):
        said = cluster.ff("admin", "user", "add", name, "--uid", str(uid), "--gid", str(uid), "--token")
        tokens[name] = said.strip().splitlines()[-1].split()[-1]
    where = f"ff://{cluster.directory}"
    with fireflyer.fs.connect(where) as root:
        root.mkdir("/ada", 0o700)
        root.mkdir("/ada-public", 0o755)
        root.mkdir("/common", 0o1777)
        root.chmod("/common", 0o1777)
        for path in ("/ada", "/ada-public"):
            root.chown(path, ADA, ADA)
    with fireflyer.fs.connect(where, token=tokens["ada"], options=FileOptions(umask=0)) as ada:
        ada.mkdir("/ada/inner", 0o777)
        for path, mode in (
            ("/ada/diary", 0o666),
            ("/ada-public/notes", 0o600),
            ("/ada-public/readable", 0o644),
            ("/common/hers", 0o600),
        ):
            with ada.open(path, "wb", permissions=mode) as file:
                file.write(SECRET_TEXT)
        ada.setxattr("/ada-public/notes", "user.mood", b"well")
        inodes = [ada.stat(path).st_ino for path in ("/ada", "/ada/diary", "/ada-public/notes")]
    return Scene(cluster, tokens, *inodes)


@pytest.fixture(autouse=True)
def unharmed(scene: Scene) -> Iterator[None]:
    """After each attempt all is as before."""

    def state(ada: FileSystem) -> list[Any]:
        paths = (
            "/ada",
            "/ada/inner",
            "/ada/diary",
            "/ada-public",
            "/ada-public/notes",
            "/ada-public/readable",
            "/common/hers",
        )
        found: list[Any] = []
        for path in paths:
            status = ada.stat(path)
            found.append((path, status.st_mode, status.st_uid, status.st_nlink, status.st_mtime_ns, status.st_ctime_ns))
            found.append(ada.listdir(path) if status.is_dir() else ada.open(path, "rb").read())
        found.append(ada.getxattr("/ada-public/notes", "user.mood"))
        return found

    with scene.connect("ada") as ada:
        before = state(ada)
        yield
        assert state(ada) == before
        assert SECRET_TEXT in before


def test_through_the_library(scene: Scene) -> None:
    notes = "/ada-public/notes"
    attempts: list[Callable[[FileSystem], object]] = [
        lambda fs: fs.listdir("/ada"),
        lambda fs: fs.stat("/ada/diary"),
        lambda fs: fs.open("/ada/diary", "rb"),
        lambda fs: fs.open("/ada/diary", "r+b"),
        lambda fs: fs.open("/ada/new", "wb"),
        lambda fs: fs.open(notes, "rb"),
        lambda fs: fs.open(notes, "r+b"),
        lambda fs: fs.open(notes, "wb"),
        lambda fs: fs.open_file(notes, os.O_RDONLY | os.O_TRUNC),
        lambda fs: fs.open_inode(scene.open_file),
        lambda fs: fs.open_inode(scene.open_file, "r+b"),
        lambda fs: fs.truncate(notes, 0),
        lambda fs: fs.chmod(notes, 0o777),
        lambda fs: fs.chown(notes, EVE, EVE),
        lambda fs: fs.chown(notes, -1, EVE),
        lambda fs: fs.utime(notes),
        lambda fs: fs.getxattr(notes, "user.mood"),
        lambda fs: fs.setxattr(notes, "user.mood", b"bad"),
        lambda fs: fs.removexattr(notes, "user.mood"),
        lambda fs: fs.unlink(notes),
        lambda fs: fs.rename(notes, "/common/mine"),
        lambda fs: fs.rename("/common/hers", "/common/mine"),
        lambda fs: fs.unlink("/common/hers"),
        lambda fs: fs.rmtree("/ada"),
        lambda fs: fs.rmtree("/ada-public"),
        lambda fs: fs.rmdir("/ada/inner"),
        lambda fs: fs.rename("/ada", "/common/ada"),
        lambda fs: fs.mkdir("/ada-public/mine"),
        lambda fs: fs.link("/ada/diary", "/common/diary"),
        lambda fs: fs.symlink("x", "/ada-public/link"),
        lambda fs: fs.set_quota("/ada-public", bytes=1),
        lambda fs: fs.set_quota("/common", bytes=1),
        lambda fs: fs.set_defaults("/ada-public", Defaults(trash_s=0)),
    ]
    with scene.connect("eve") as eve:
        for number, attempt in enumerate(attempts):
            with pytest.raises(PermissionError) as caught:
                attempt(eve)
            assert caught.value.errno in REFUSALS, number
        assert eve.listdir("/common") == ["hers"]
        eve.symlink("/ada/diary", "/common/trick")
        with pytest.raises(PermissionError):
            eve.open("/common/trick", "rb")
        eve.unlink("/common/trick")


@needs_fuse
@pytest.mark.parametrize("trusted", [True, False], ids=["that is trusted", "with her token"])
def test_through_a_mount(scene: Scene, tmp_path: Path, trusted: bool) -> None:
    """Of the machine, as herself; or of her own, where all act as she does."""
    place, token = tmp_path / "mount", tmp_path / "token"
    place.mkdir()
    token.write_text(scene.tokens["eve"])
    token.chmod(0o600)
    how = ["--dir", str(scene.cluster.directory), "--allow-other"]
    if not trusted:
        how = ["--manager", scene.managers[0], "--token-file", str(token)]
    command = [sys.executable, "-P", "-m", "fireflyer", "fs", "mount", str(place), *how]
    with mounted(command, str(place)) as mount, contextlib.closing(LocalPlace(mount.path)) as calls:
        eve = User(calls, Identity(EVE, EVE) if trusted else Identity(0, 0))
        notes, diary = "/ada-public/notes", "/ada/diary"
        attempts: list[Callable[[], object]] = [
            lambda: eve.listdir("/ada"),
            lambda: eve.scandir("/ada"),
            lambda: eve.stat(diary),
            lambda: eve.stat("/ada/none"),
            lambda: eve.open(diary),
            lambda: eve.open(diary, os.O_WRONLY),
            lambda: eve.open("/ada/new", os.O_WRONLY | os.O_CREAT),
            lambda: eve.open(notes),
            lambda: eve.open(notes, os.O_RDWR),
            lambda: eve.open(notes, os.O_RDONLY | os.O_TRUNC),
            lambda: eve.truncate(notes, 0),
            lambda: eve.truncate(diary, 0),
            lambda: eve.chmod(notes, 0o777),
            lambda: eve.chmod("/ada", 0o777),
            lambda: eve.chown(notes, EVE, EVE),
            lambda: eve.utimens(notes, 1, 2),
            lambda: eve.utimens(notes, NOW, NOW),
            lambda: eve.getxattr(notes, "user.mood"),
            lambda: eve.setxattr(notes, "user.mood", b"bad"),
            lambda: eve.removexattr(notes, "user.mood"),
            lambda: eve.access(notes, os.R_OK),
            lambda: eve.access(diary, os.F_OK),
            lambda: eve.unlink(notes),
            lambda: eve.unlink(diary),
            lambda: eve.unlink("/common/hers"),
            lambda: eve.rmdir("/ada/inner"),
            lambda: eve.rename(notes, "/common/mine"),
            lambda: eve.rename("/common/hers", "/common/mine"),
            lambda: eve.rename("/ada", "/common/ada"),
            lambda: eve.mkdir("/ada-public/mine"),
            lambda: eve.mkdir("/ada/inner/mine"),
            lambda: eve.symlink("x", "/ada-public/link"),
            lambda: eve.link(diary, "/common/diary"),
            lambda: eve.mknod("/ada-public/fifo", stat.S_IFIFO | 0o600),
        ]
        for number, attempt in enumerate(attempts):
            assert errno_of(attempt) in REFUSALS, number
        eve.symlink(diary, "/common/trick")
        assert errno_of(eve.open, "/common/trick") == errno.EACCES
        eve.unlink("/common/trick")
        # What Ada opens through the same mount is of no use to Eve, nor is what is kept of it in memory.
        if trusted:
            ada = User(calls, Identity(ADA, ADA))
            assert ada.read(notes) == ada.read(diary) == SECRET_TEXT
            assert errno_of(eve.open, notes) == errno_of(eve.open, diary) == errno.EACCES
            root = User(calls, Identity(0, 0))
            assert root.read(diary) == SECRET_TEXT  # `ff fs up` says that root is root
        assert eve.listdir("/common") == ["hers"]


def test_by_raw_requests(scene: Scene) -> None:
    asyncio.run(_raw_requests(scene))


async def _raw_requests(scene: Scene) -> None:
    async with AsyncExitStack() as stack:
        clients = {}
        for name in ("ada", "eve"):
            raw = RawClient(scene.managers, scene.managers[:1], UserCredential(scene.tokens[name]))
            clients[name] = await stack.enter_async_context(raw)
        ada, eve = clients["ada"], clients["eve"]
        opened = await ada.ask(meta.Open(PathRef(scene.open_file), OpenFlag.READ | OpenFlag.WRITE, HERS))
        assert isinstance(opened, Opened)
        within, itself = PathRef(scene.directory, b"diary"), PathRef(scene.open_file)
        read, write = OpenFlag.READ | OpenFlag.FOLLOW, OpenFlag.WRITE | OpenFlag.FOLLOW
        denied = (*REFUSALS, errno.EBADF)
        attempts: list[meta.Request] = [
            meta.ListDirectory(scene.directory),
            meta.Stat(within),
            meta.Open(within, read),
            meta.Open(within, write, 1),
            meta.Open(itself, read),
            meta.Open(itself, write, 2),
            meta.Open(itself, OpenFlag.TRUNCATE, 0),
            meta.Open(itself, OpenFlag.EXECUTE),
            meta.Open(PathRef(scene.directory, b"new"), write | OpenFlag.CREATE, 3),
            meta.Renew(scene.open_file, int(Rights.READ), 0),
            meta.Renew(scene.open_file, int(Rights.READ), HERS),
            meta.Renew(scene.open_file, int(Rights.WRITE), HERS),
            meta.Report(scene.open_file, HERS, 1000, 0),
            meta.Close(scene.open_file, HERS, 1000, 0),
            meta.Reserve(scene.open_file, HERS, 1000),
            meta.Truncate(itself, 0),
            meta.Truncate(itself, 0, HERS),
            meta.Allocate(scene.open_file, HERS, meta.AllocateMode.PUNCH_HOLE, 0, 10),
            meta.Lock(scene.open_file, meta.Window.WHOLE, 1, meta.LockKind.WRITE),
            meta.GetXattr(itself, b"user.mood"),
            meta.SetXattr(itself, b"user.mood", b"bad"),
            meta.SetAttributes(itself, mode=0o777),
            meta.SetAttributes(itself, uid=EVE),
            meta.SetAttributes(itself, mtime_ns=0),
            meta.Remove(within),
            meta.RemoveTree(PathRef(scene.directory)),
            meta.RemoveTree(PathRef(ROOT, b"ada")),
            meta.Rename(within, PathRef(ROOT, b"common/mine")),
            meta.Rename(PathRef(ROOT, b"common/hers"), PathRef(ROOT, b"common/mine")),
            meta.Link(within, PathRef(ROOT, b"common/mine")),
            meta.SetQuota(PathRef(scene.directory), 1),
            meta.SetDefaults(PathRef(scene.directory), Defaults()),
            meta.MakeDirectory(PathRef(scene.directory, b"mine")),
        ]
        # Open to all by their own modes, behind a directory that is not.
        diary, inner = [await ada.ask(meta.Stat(PathRef(scene.directory, name))) for name in (b"diary", b"inner")]
        assert isinstance(diary, meta.Found)
        assert isinstance(inner, meta.Found)
        attempts += [
            meta.Stat(PathRef(diary.inode.id)),
            meta.Open(PathRef(diary.inode.id), read),
            meta.Open(PathRef(diary.inode.id), write, 4),
            meta.Renew(diary.inode.id, int(Rights.READ), 0),
            meta.ListDirectory(inner.inode.id),
            meta.MakeDirectory(PathRef(inner.inode.id, b"mine")),
            meta.Rename(PathRef(ROOT, b"common/eves"), PathRef(inner.inode.id, b"mine")),
        ]
        for request in attempts:
            answer = await eve.ask(request)
            assert isinstance(answer, ErrorReply), request
            more = (errno.EINVAL,) if isinstance(request, meta.RemoveTree) else ()
            assert answer.errno in (*denied, *more), (request, answer)
        neither = await eve.ask(meta.Open(itself, OpenFlag(0)))
        assert isinstance(neither, ErrorReply) or (isinstance(neither, Opened) and not neither.capability), neither
        for actor in (Actor(0, 0), Actor(ADA, ADA), Actor(EVE, EVE, (ADA,))):
            await _refused(eve, meta.Stat(within), actor=actor)
        await _as_somebody_elses_client(scene, ada, eve)
        # Ada still has it open, and may do what Eve may not.
        assert isinstance(await ada.ask(meta.Renew(scene.open_file, int(Rights.WRITE), HERS)), Opened)
        closed = await ada.ask(meta.Close(scene.open_file, HERS, 0, 0, wrote=False))
        assert isinstance(closed, meta.Found)


async def _as_somebody_elses_client(scene: Scene, ada: RawClient, eve: RawClient) -> None:
    mine, eve.client = eve.client, ada.client
    for request, number in (
        (meta.ListDirectory(scene.directory), None),
        (meta.Lock(scene.open_file, meta.Window.WHOLE, 1, meta.LockKind.WRITE), None),
        (meta.Close(scene.open_file, HERS, 0, 0), None),
        (meta.MakeDirectory(PathRef(ROOT, b"common/forged")), 1_000_000),
        # The number that Ada's own request had: its answer would hold her capability.
        (meta.Open(PathRef(scene.open_file), OpenFlag.READ | OpenFlag.WRITE, HERS), 1),
    ):
        await _refused(eve, request, number=number)
    eve.client = mine


async def _refused(
    client: RawClient, request: meta.Request, *, actor: Actor | None = None, number: int | None = None
) -> None:
    try:
        answer = await client.ask(request, actor=actor, number=number)
    except PermissionDenied:
        return
    assert isinstance(answer, ErrorReply), answer
    assert answer.errno in (*REFUSALS, errno.ESTALE, errno.EIO), answer


def test_by_raw_chunks(scene: Scene) -> None:
    asyncio.run(_raw_chunks(scene))


@dataclass(frozen=True)
class Chunk:
    """The first one of Ada's file, and a replica that answers."""

    chain: int
    version: int
    id: ChunkId
    address: str

    async def read(self, connection: DataConnection) -> int:
        answer = await connection.read(self.chain, self.version, self.id.file, self.id.index, 0, len(SECRET_TEXT))
        assert (answer.data == SECRET_TEXT) == (answer.status == FOUND)
        return answer.status

    async def attempts(self, connection: DataConnection, client: int) -> list[bool]:
        """Whether Eve came through."""
        change = Change(Operation.TRUNCATE, 0, 1)
        update = Update(self.chain, self.version, client, 3, 1, self.id, change)
        removal = msgspec.structs.replace(update, change=Change(Operation.REMOVE), channel=4)
        kinds = QueryKind.STAT, QueryKind.LIST, QueryKind.CHAIN
        looks = [Query(self.chain, self.version, kind, self.id) for kind in kinds]
        through = [await self.read(connection) != DENIED]
        for body in (update, removal, *looks):
            reply = await connection.ask(body)
            through.append(not (isinstance(reply, ChunkRefused) and reply.refusal is RefusalReason.DENIED))
        return through


async def _raw_chunks(scene: Scene) -> None:
    managers, service = access_of(str(scene.cluster.directory))
    ada_user, eve_user = (UserCredential(scene.tokens[name]) for name in ("ada", "eve"))
    async with AsyncExitStack() as stack:
        chunk = await _first_chunk(scene, managers, service)
        ada = await stack.enter_async_context(RawClient(managers, managers[:1], ada_user))
        eve = await stack.enter_async_context(RawClient(managers, managers[:1], eve_user))
        opened = await ada.ask(meta.Open(PathRef(scene.open_file), OpenFlag.READ | OpenFlag.WRITE, HERS))
        assert isinstance(opened, Opened)
        connection = await DataConnection.connect(chunk.address, eve_user)
        stack.push_async_callback(connection.close)
        assert not any(await chunk.attempts(connection, eve.client))
        assert not any(await chunk.attempts(connection, ada.client))
        for name, token in _tokens(scene, opened.capability, eve.client).items():
            told = await connection.ask(data.Present(token))
            assert isinstance(told, ChunkRefused), name
            assert told.refusal is RefusalReason.DENIED, name
            assert not any(await chunk.attempts(connection, eve.client)), name
        # What she is really given, for a file of hers, is of no use for another one.
        flags = OpenFlag.READ | OpenFlag.WRITE | OpenFlag.CREATE
        hers = await eve.ask(meta.Open(PathRef(ROOT, b"common/eve"), flags, 1, 0o600))
        assert isinstance(hers, Opened)
        assert isinstance(await connection.ask(data.Present(hers.capability)), data.Granted)
        assert not any(await chunk.attempts(connection, eve.client))
        assert not any(await chunk.attempts(connection, ada.client))
        readable = await _first_chunk(scene, managers, service, "/ada-public/readable")
        reading = await DataConnection.connect(readable.address, eve_user)
        stack.push_async_callback(reading.close)
        await _with_the_right_to_read(reading, readable, eve)
        asking = ManagerClient(managers, eve_user)
        stack.push_async_callback(asking.close)
        for client in (eve.client, ada.client):
            with pytest.raises(FireflyerError):
                await asking.ask(GetCapability(client, scene.open_file, scene.open_file, int(Rights.READ)))
        # And what Ada was given is of use to Ada.
        own = await DataConnection.connect(chunk.address, ada_user)
        stack.push_async_callback(own.close)
        assert await chunk.read(own) == DENIED
        assert isinstance(await own.ask(data.Present(opened.capability)), data.Granted)
        assert await chunk.read(own) == FOUND
        # What the chain has of all files is for nobody's token, whatever he may read.
        every = await own.ask(Query(chunk.chain, chunk.version, QueryKind.CHAIN, chunk.id))
        assert isinstance(every, ChunkRefused)
        assert every.refusal is RefusalReason.DENIED
        trusted = await DataConnection.connect(chunk.address, service)
        stack.push_async_callback(trusted.close)
        every = await trusted.ask(Query(chunk.chain, chunk.version, QueryKind.CHAIN, chunk.id))
        assert isinstance(every, Found)
        assert every.entries[0].chunk == chunk.id
        await eve.ask(meta.Remove(PathRef(ROOT, b"common/eve")))


async def _with_the_right_to_read(connection: DataConnection, chunk: Chunk, eve: RawClient) -> None:
    """That file she may read, and writes nothing by that."""
    itself = PathRef(chunk.id.file)
    opened = await eve.ask(meta.Open(itself, OpenFlag.READ | OpenFlag.FOLLOW))
    assert isinstance(opened, Opened)
    assert isinstance(await eve.ask(meta.Open(itself, OpenFlag.WRITE, 9)), ErrorReply)
    assert isinstance(await eve.ask(meta.Renew(chunk.id.file, int(Rights.READ | Rights.WRITE), 0)), ErrorReply)
    assert isinstance(await connection.ask(data.Present(opened.capability)), data.Granted)
    read, update, removal, *_ = await chunk.attempts(connection, eve.client)
    assert (read, update, removal) == (True, False, False)
    assert await chunk.read(connection) == FOUND


async def _first_chunk(scene: Scene, managers: tuple[str, ...], service: Credential, path: str = _NOTES) -> Chunk:
    with ExitStack() as closing:
        root = closing.enter_context(fireflyer.fs.connect(scene.where))
        inode = root.stat(path).inode
    body = inode.body
    assert isinstance(body, FileDetails)
    async with await connect_chunks(managers, service) as chunks:
        routing = chunks.routing
        chain_id = order_of(body.layout, chunks.chains(body.layout.table))[0]
    chain = next(one for one in routing.chains if one.id == chain_id)
    tail = [member for member in chain.members if member.state == "serving"][-1]
    address = next(node.address for node in routing.nodes if node.id == tail.node)
    return Chunk(chain.id, chain.version, ChunkId(inode.id, 0), address)


def _tokens(scene: Scene, adas: bytes, client: int) -> dict[str, bytes]:
    """Capabilities that Eve must not get through with; those that she could not sign herself, the test signs."""
    real = msgspec.msgpack.decode(adas[32:], type=Capability)
    key = derive_key(scene.secret, real.key_id)
    now_s = int(time.time())
    as_eve = msgspec.structs.replace(real, user="eve", client=client)
    good = sign(as_eve, key)
    return {
        "nothing": b"",
        "noise": bytes(len(adas)),
        "Ada's": adas,
        "Ada's, with her name changed": adas[:32] + msgspec.msgpack.encode(as_eve),
        "one bit other": good[:40] + bytes([good[40] ^ 1]) + good[41:],
        "one bit of the signature other": bytes([good[0] ^ 1]) + good[1:],
        "cut short": good[:-1],
        "longer": good + b"\0",
        "signed with a key of hers": sign(as_eve, derive_key(b"eve" * 11, real.key_id)),
        "signed with a key that is not in use": sign(
            msgspec.structs.replace(as_eve, key_id=real.key_id + 1), derive_key(scene.secret, real.key_id + 1)
        ),
        "expired": sign(msgspec.structs.replace(as_eve, expires_s=now_s - 1), key),
        "for ever": sign(msgspec.structs.replace(as_eve, expires_s=now_s + 100_000), key),
    }


def test_a_token_that_is_nearly_right(scene: Scene) -> None:
    token = scene.tokens["ada"]
    other = "a" if token[-1] != "a" else "b"
    for forged in (token[:-1] + other, token.replace(token.split(".")[1], scene.tokens["eve"].split(".")[1])):
        with pytest.raises(PermissionDenied):
            fireflyer.fs.connect(scene.where, token=forged)
