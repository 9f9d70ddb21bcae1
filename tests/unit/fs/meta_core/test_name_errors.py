"""Each errno that POSIX, or Linux where POSIX leaves it open, names for an operation on names."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import msgspec
import pytest
from tests.support.fs.clusters.names import ADMINISTRATOR, Names, at, user

from fireflyer.base.errors import DataCorruption
from fireflyer.fs.core.meta import tables
from fireflyer.fs.core.meta.context import Context, Requester
from fireflyer.fs.core.meta.open_files import locks
from fireflyer.fs.core.meta.open_files.renew import renew
from fireflyer.fs.schema.inodes import MAX_LINKS, ROOT, Defaults, Kind
from fireflyer.fs.schema.meta import (
    Access,
    Found,
    FoundMany,
    GetQuota,
    GetSpace,
    GetXattr,
    Link,
    ListDirectory,
    Listing,
    ListXattrs,
    Lock,
    LockKind,
    MakeDirectory,
    MakeNode,
    Now,
    Open,
    OpenFlag,
    PathRef,
    ReadLink,
    Remove,
    RemoveDirectory,
    RemoveTree,
    RemoveXattr,
    Rename,
    RenameFlag,
    Renew,
    Request,
    SetAttributes,
    SetDefaults,
    SetQuota,
    SetXattr,
    Stat,
    StatMany,
    Symlink,
    Truncate,
    Window,
    XattrFlag,
)

ALICE, BOB, CAROL = user(1001, 1001, 500), user(1002, 1002, 500), user(1003)
READ, WRITE, CREATE, FOLLOW = OpenFlag.READ, OpenFlag.WRITE, OpenFlag.CREATE, OpenFlag.FOLLOW
EXCLUSIVE = CREATE | OpenFlag.EXCLUSIVE
LONG, LONGEST = b"n" * 256, b"p/" * 2048
FILE_INODE, GONE = 3, 999_999


@pytest.fixture(scope="module")
def names() -> Iterator[Names]:
    """What is refused changes nothing, so that all rows of a table can ask the same file system."""
    with Names(mode=0o755) as names:
        names.do(
            MakeDirectory(at("d")),
            Open(at("f"), EXCLUSIVE | READ, 0, 0o640),
            MakeDirectory(at("d/full")),
            MakeDirectory(at("d/full/x")),
            Symlink(at("to_d"), b"d"),
            Symlink(at("to_f"), b"f"),
            Symlink(at("to_nothing"), b"nothing"),
            Symlink(at("loop"), b"pool"),
            Symlink(at("pool"), b"loop"),
            Link(at("f"), at("f2")),
            MakeNode(at("fifo"), Kind.FIFO),
            MakeDirectory(at("tmp"), 0o1777),
            MakeDirectory(at("open"), 0o777),
            MakeDirectory(at("quota")),
            SetQuota(at("quota"), 1000, 2),
            MakeDirectory(at("quota/one")),
        )
        names.do(SetAttributes(at("tmp"), mode=0o1777), SetAttributes(at("open"), mode=0o777))
        names.do(
            MakeDirectory(at("tmp/alices"), 0o777),
            Open(at("tmp/file"), EXCLUSIVE | READ, 0, 0o644),
            MakeDirectory(at("open/private"), 0o700),
            Open(at("open/private/f"), EXCLUSIVE | READ, 0, 0o644),
            MakeDirectory(at("open/searched"), 0o711),
            Open(at("open/group"), EXCLUSIVE | READ, 0, 0o070),
            Open(at("open/program"), EXCLUSIVE | READ, 0, 0o710),
            SetXattr(at("tmp/file"), b"user.there", b"1"),
            requester=ALICE,
        )
        names.do(SetAttributes(at("open/group"), gid=500), requester=ALICE)
        for path in ("open/gone", "open/cwd"):
            names.do(MakeDirectory(at(path), 0o777))
        assert names.stat("f").id == FILE_INODE
        yield names
        names.check()


def removed_directory(names: Names) -> int:
    """Removed while it is somebody's working directory."""
    name = f"open/cwd{names.now_ns}"
    names.do(MakeDirectory(at(name), 0o777))
    inode = names.stat(name).id
    names.do(RemoveDirectory(at(name)))
    return inode


PATHS: list[tuple[bytes, int]] = [
    (b"nothing", errno.ENOENT),
    (b"nothing/f", errno.ENOENT),
    (b"f/x", errno.ENOTDIR),
    (b"f/", errno.ENOTDIR),
    (b"f/.", errno.ENOTDIR),
    (b"f/..", errno.ENOTDIR),
    (b"to_f/", errno.ENOTDIR),
    (b"to_nothing", errno.ENOENT),
    (b"loop", errno.ELOOP),
    (b"loop/x", errno.ELOOP),
    (LONG, errno.ENAMETOOLONG),
    (LONG + b"/x", errno.ENAMETOOLONG),
    (b"d/" + LONG, errno.ENAMETOOLONG),
    (LONGEST, errno.ENAMETOOLONG),
    (b"d\0", errno.EINVAL),
]


@pytest.mark.parametrize(("path", "expected"), PATHS)
def test_a_path_that_leads_nowhere(names: Names, path: bytes, expected: int) -> None:
    place = at(path)
    requests: list[Request] = [
        Stat(place),
        Access(place, 0),
        Open(place, READ | FOLLOW),
        SetAttributes(place, mode=0o600),
        GetXattr(place, b"user.x"),
        SetXattr(place, b"user.x", b""),
        RemoveXattr(place, b"user.x"),
        ListXattrs(place),
        Link(place, at("new"), follow=True),
        Truncate(place, 0),
        GetQuota(place),
        SetQuota(place, 1),
        SetDefaults(place, Defaults()),
    ]
    for request in requests:
        assert names.errno(request) == expected, request
    found = names.ask(StatMany((place, at("d"))), FoundMany).inodes
    assert found[0] == expected
    assert found[1] == names.stat("d")


DIRECTORY_PATHS = [row for row in PATHS if row[0] not in (b"nothing", b"f/", b"to_f/", b"to_nothing", b"loop", b"d\0")]


@pytest.mark.parametrize(("path", "expected"), DIRECTORY_PATHS)
def test_a_path_whose_directories_lead_nowhere(names: Names, path: bytes, expected: int) -> None:
    if path in (b"f/.", b"f/.."):
        return
    place = at(path)
    requests: list[Request] = [
        MakeDirectory(place),
        MakeNode(place, Kind.FIFO),
        Symlink(place, b"t"),
        Link(at("f"), place),
        Remove(place),
        RemoveDirectory(place),
        RemoveTree(place),
        Rename(place, at("new")),
        Rename(at("f"), place),
        Open(place, CREATE | READ),
        ReadLink(place),
    ]
    for request in requests:
        assert names.errno(request) == expected, request


def test_forty_links_are_followed_and_no_more() -> None:
    with Names() as names:
        names.do(MakeDirectory(at("0")))
        for number in range(1, 42):
            names.do(Symlink(at(f"{number}"), b"%d" % (number - 1)))
        assert names.errno(Stat(at("40"))) == 0
        assert names.errno(Stat(at("41"))) == errno.ELOOP
        assert names.errno(Stat(at("41"), follow=False)) == 0
        assert names.errno(Stat(at("41/"), follow=False)) == errno.ELOOP
        names.do(MakeDirectory(at("0/s")), Symlink(at("0/s/l"), b"/20/s"))
        assert names.errno(Stat(at("20/s/l"))) == errno.ELOOP  # 20, and 20 from the root, and l
        assert names.errno(Stat(at("19/s/l"))) == 0


AS_ROOT: list[tuple[Request, int]] = [
    (Stat(at("", GONE)), errno.ESTALE),
    (Stat(at("x", GONE)), errno.ESTALE),
    (Stat(at("x", FILE_INODE)), errno.ENOTDIR),
    (Stat(at("", FILE_INODE)), 0),
    (Stat(at("to_nothing"), follow=False), 0),
    (Stat(at("to_nothing/"), follow=False), errno.ENOENT),
    (ListDirectory(GONE), errno.ESTALE),
    (ListDirectory(FILE_INODE), errno.ENOTDIR),
    (ReadLink(at("f")), errno.EINVAL),
    (ReadLink(at("d")), errno.EINVAL),
    (ReadLink(at("to_d/")), errno.EINVAL),
    (ReadLink(at("loop")), 0),
    (Access(at("f"), 7), errno.EACCES),
    (Access(at("f"), 6), 0),
    (Access(at("d"), 7), 0),
    (Access(at("open/program"), 7), 0),
    (GetSpace(GONE), errno.ESTALE),
    (GetQuota(at("d")), errno.ENODATA),
    # open
    (Open(at("d"), READ | CREATE), errno.EISDIR),
    (Open(at("d"), WRITE, 1), errno.EISDIR),
    (Open(at("d"), READ | OpenFlag.TRUNCATE), errno.EISDIR),
    (Open(at("d"), OpenFlag.EXECUTE), errno.EACCES),
    (Open(at("d"), READ | OpenFlag.DIRECTORY), 0),
    (Open(at("f"), READ | OpenFlag.DIRECTORY), errno.ENOTDIR),
    (Open(at("f"), OpenFlag.EXECUTE), errno.EACCES),
    (Open(at("f"), READ | EXCLUSIVE), errno.EEXIST),
    (Open(at("d"), READ | EXCLUSIVE), errno.EEXIST),
    (Open(at("to_nothing"), READ | EXCLUSIVE | FOLLOW), errno.EEXIST),
    (Open(at("to_f"), READ), errno.ELOOP),
    (Open(at("to_d"), READ | OpenFlag.DIRECTORY), errno.ENOTDIR),
    (Open(at("new/"), READ | CREATE), errno.EISDIR),
    (Open(at("."), READ | CREATE), errno.EISDIR),
    (Open(at("/"), READ | EXCLUSIVE), errno.EEXIST),
    (Open(at("fifo"), READ), errno.ENXIO),
    (Open(at("nothing"), READ), errno.ENOENT),
    (Open(at("to_nothing"), READ | FOLLOW), errno.ENOENT),
    # making
    (MakeDirectory(at("d")), errno.EEXIST),
    (MakeDirectory(at("f")), errno.EEXIST),
    (MakeDirectory(at("to_nothing")), errno.EEXIST),
    (MakeDirectory(at("to_nothing/")), errno.EEXIST),
    (MakeDirectory(at(".")), errno.EEXIST),
    (MakeDirectory(at("..")), errno.EEXIST),
    (MakeDirectory(at("/")), errno.EEXIST),
    (MakeDirectory(at("")), errno.EEXIST),
    (MakeDirectory(at("quota/one/two")), errno.EDQUOT),
    (MakeNode(at("f"), Kind.FILE), errno.EEXIST),
    (MakeNode(at("new/"), Kind.FILE), errno.ENOENT),
    (MakeNode(at("new"), Kind.DIRECTORY), errno.EPERM),
    (MakeNode(at("new"), Kind.SYMLINK), errno.EINVAL),
    (MakeNode(at("quota/fifo"), Kind.FIFO), errno.EDQUOT),
    (Symlink(at("d"), b"x"), errno.EEXIST),
    (Symlink(at("new"), b""), errno.ENOENT),
    (Symlink(at("new"), LONGEST), errno.ENAMETOOLONG),
    (Symlink(at("new"), b"a\0b"), errno.EINVAL),
    (Symlink(at("new/"), b"x"), errno.ENOENT),
    (Symlink(at("quota/l"), b"x"), errno.EDQUOT),
    (Link(at("d"), at("new")), errno.EPERM),
    (Link(at("f"), at("d")), errno.EEXIST),
    (Link(at("f"), at("f")), errno.EEXIST),
    (Link(at("f"), at("new/")), errno.ENOENT),
    (Link(at("f"), at("quota/f")), errno.EXDEV),
    (Link(at("to_nothing"), at("new"), follow=True), errno.ENOENT),
    # removing
    (Remove(at("d")), errno.EISDIR),
    (Remove(at("d/")), errno.EISDIR),
    (Remove(at("to_d/")), errno.ENOTDIR),
    (Remove(at("f/")), errno.ENOTDIR),
    (Remove(at("nothing/")), errno.ENOENT),
    (Remove(at("nothing")), errno.ENOENT),
    (Remove(at(".")), errno.EISDIR),
    (Remove(at("")), errno.EISDIR),
    (RemoveDirectory(at("f")), errno.ENOTDIR),
    (RemoveDirectory(at("to_d")), errno.ENOTDIR),
    (RemoveDirectory(at("to_d/")), errno.ENOTDIR),
    (RemoveDirectory(at("d")), errno.ENOTEMPTY),
    (RemoveDirectory(at("d/.")), errno.EINVAL),
    (RemoveDirectory(at("d/full/..")), errno.ENOTEMPTY),
    (RemoveDirectory(at("/")), errno.EBUSY),
    (RemoveTree(at("/")), errno.EBUSY),
    (RemoveTree(at("f")), errno.ENOTDIR),
    (RemoveTree(at("d/.")), errno.EINVAL),
    # rename
    (Rename(at("d"), at("d/full/d")), errno.EINVAL),
    (Rename(at("d"), at("d/d")), errno.EINVAL),
    (Rename(at("to_d"), at("d/full")), errno.EISDIR),
    (Rename(at("d/full/x"), at("d/full")), errno.ENOTEMPTY),
    (Rename(at("open"), at("d/full")), errno.ENOTEMPTY),
    (Rename(at("d"), at("f")), errno.ENOTDIR),
    (Rename(at("f"), at("d")), errno.EISDIR),
    (Rename(at("f"), at("new/")), errno.ENOTDIR),
    (Rename(at("f/"), at("new")), errno.ENOTDIR),
    (Rename(at("d"), at(".")), errno.EBUSY),
    (Rename(at("d/.."), at("new")), errno.EBUSY),
    (Rename(at("/"), at("new")), errno.EBUSY),
    (Rename(at("d"), at("/")), errno.EBUSY),
    (Rename(at("f"), at("f2"), RenameFlag.NO_REPLACE), errno.EEXIST),
    (Rename(at("f"), at("."), RenameFlag.NO_REPLACE), errno.EEXIST),
    (Rename(at("f"), at("new"), RenameFlag.EXCHANGE), errno.ENOENT),
    (Rename(at("f"), at("d"), RenameFlag.NO_REPLACE | RenameFlag.EXCHANGE), errno.EINVAL),
    (Rename(at("d/full"), at("d"), RenameFlag.EXCHANGE), errno.EINVAL),
    (Rename(at("d"), at("d/full"), RenameFlag.EXCHANGE), errno.EINVAL),
    (Rename(at("d"), at("f/"), RenameFlag.EXCHANGE), errno.ENOTDIR),
    (Rename(at("f"), at("quota/f")), errno.EXDEV),
    (Rename(at("quota/one"), at("new")), errno.EXDEV),
    (Rename(at("f"), at("quota/one"), RenameFlag.EXCHANGE), errno.EXDEV),
    # attributes
    (SetAttributes(at("to_f"), follow=False, mode=0o600), errno.EOPNOTSUPP),
    (SetAttributes(at("f"), uid=(1 << 32) - 1), errno.EINVAL),
    (Truncate(at("d"), 0), errno.EISDIR),
    (Truncate(at("fifo"), 0), errno.EINVAL),
    (SetDefaults(at("f"), Defaults()), errno.ENOTDIR),
    (SetDefaults(at("d"), Defaults(chunk_bytes=100_000)), errno.EINVAL),
    (SetDefaults(at("d"), Defaults(chunk_bytes=1 << 27)), errno.EINVAL),
    (SetDefaults(at("d"), Defaults(stripe=5000)), errno.EINVAL),
    (SetQuota(at("f"), 1), errno.ENOTDIR),
    (SetQuota(at("d")), errno.ENODATA),
    # extended attributes
    (GetXattr(at("f"), b"user.nothing"), errno.ENODATA),
    (GetXattr(at("f"), b""), errno.ERANGE),
    (GetXattr(at("f"), b"user." + b"n" * 251), errno.ERANGE),
    (GetXattr(at("f"), b"user."), errno.EINVAL),
    (GetXattr(at("f"), b"system.posix_acl_access"), errno.EOPNOTSUPP),
    (SetXattr(at("f"), b"colour", b"x"), errno.EOPNOTSUPP),
    (SetXattr(at("f"), b"user.x", b"x", XattrFlag.REPLACE), errno.ENODATA),
    (SetXattr(at("tmp/file"), b"user.there", b"x", XattrFlag.CREATE), errno.EEXIST),
    (SetXattr(at("to_f"), b"user.x", b"x", follow=False), errno.EPERM),
    (GetXattr(at("to_f"), b"user.x", follow=False), errno.ENODATA),
    (SetXattr(at("fifo"), b"user.x", b"x"), errno.EPERM),
    (RemoveXattr(at("f"), b"user.nothing"), errno.ENODATA),
]


@pytest.mark.parametrize(("request_", "expected"), AS_ROOT)
def test_what_root_is_refused(names: Names, request_: Request, expected: int) -> None:
    assert names.errno(request_) == expected


AS_USERS: list[tuple[Requester, Request, int]] = [
    # search
    (BOB, Stat(at("open/private/f")), errno.EACCES),
    (BOB, Stat(at("open/private/nothing")), errno.EACCES),
    (BOB, Stat(at("open/private/..")), errno.EACCES),
    (BOB, Stat(at("open/private/.")), errno.EACCES),
    (BOB, Stat(at("open/private")), 0),
    (BOB, Stat(at("open/private/")), 0),
    (ALICE, Stat(at("open/private/f")), 0),
    (ADMINISTRATOR, Stat(at("open/private/f")), 0),
    (BOB, Stat(at("open/searched/nothing")), errno.ENOENT),
    (BOB, MakeDirectory(at("open/private/f")), errno.EACCES),
    # which class counts
    (ALICE, Access(at("open/group"), 4), errno.EACCES),
    (BOB, Access(at("open/group"), 7), 0),
    (CAROL, Access(at("open/group"), 4), errno.EACCES),
    (ADMINISTRATOR, Access(at("open/group"), 7), 0),
    (ADMINISTRATOR, Access(at("open/program"), 1), 0),
    (BOB, Access(at("tmp/file"), 0), 0),
    (BOB, Access(at("tmp/file"), 4), 0),
    (BOB, Access(at("tmp/file"), 2), errno.EACCES),
    (BOB, Open(at("tmp/file"), READ), 0),
    (BOB, Open(at("tmp/file"), WRITE, 1), errno.EACCES),
    (BOB, Open(at("tmp/file"), READ | OpenFlag.TRUNCATE), errno.EACCES),
    (BOB, Open(at("tmp/file"), OpenFlag.EXECUTE), errno.EACCES),
    (BOB, Open(at("fifo"), WRITE, 1), errno.ENXIO),
    (BOB, Open(at("fifo"), OpenFlag.EXECUTE), errno.EACCES),
    (BOB, Truncate(at("tmp/file"), 0), errno.EACCES),
    # directories that may not be written
    (BOB, MakeDirectory(at("new")), errno.EACCES),
    (BOB, MakeDirectory(at("d")), errno.EEXIST),
    (BOB, MakeNode(at("new"), Kind.FIFO), errno.EACCES),
    (BOB, MakeNode(at("open/null"), Kind.CHARACTER), errno.EPERM),
    (BOB, MakeNode(at("open/disk"), Kind.BLOCK), errno.EPERM),
    (BOB, MakeNode(at("null"), Kind.CHARACTER), errno.EACCES),
    (BOB, Symlink(at("new"), b"x"), errno.EACCES),
    (BOB, Link(at("tmp/file"), at("new")), errno.EACCES),
    (BOB, Link(at("d"), at("new")), errno.EACCES),
    (BOB, Open(at("new"), READ | CREATE), errno.EACCES),
    (BOB, Remove(at("f")), errno.EACCES),
    (BOB, Remove(at("nothing")), errno.ENOENT),
    (BOB, RemoveDirectory(at("d")), errno.EACCES),
    (BOB, RemoveTree(at("d")), errno.EACCES),
    (BOB, Rename(at("f"), at("open/f")), errno.EACCES),
    (BOB, Rename(at("open/gone"), at("gone")), errno.EACCES),
    # sticky
    (BOB, Remove(at("tmp/file")), errno.EPERM),
    (BOB, RemoveDirectory(at("tmp/alices")), errno.EPERM),
    (BOB, RemoveTree(at("tmp/alices")), errno.EPERM),
    (BOB, Rename(at("tmp/file"), at("tmp/new")), errno.EPERM),
    (BOB, Rename(at("open/program"), at("tmp/file")), errno.EPERM),
    (BOB, Rename(at("open/program"), at("tmp/file"), RenameFlag.EXCHANGE), errno.EPERM),
    # its ".." would change
    (BOB, Rename(at("open/searched"), at("tmp/searched")), errno.EACCES),
    # listing
    (BOB, ListDirectory(ROOT), 0),
    # attributes
    (BOB, SetAttributes(at("tmp/file"), mode=0o777), errno.EPERM),
    (BOB, SetAttributes(at("tmp/file"), uid=1002), errno.EPERM),
    (ALICE, SetAttributes(at("tmp/file"), uid=1002), errno.EPERM),
    (ALICE, SetAttributes(at("tmp/file"), gid=7), errno.EPERM),
    (BOB, SetAttributes(at("tmp/file"), gid=500), errno.EPERM),
    (BOB, SetAttributes(at("tmp/file"), mtime_ns=1), errno.EPERM),
    (BOB, SetAttributes(at("tmp/file"), atime_ns=1), errno.EPERM),
    (BOB, SetAttributes(at("tmp/file"), now=Now.MTIME | Now.ATIME), errno.EACCES),
    (BOB, SetAttributes(at("open/group"), mtime_ns=1), errno.EPERM),
    (BOB, SetAttributes(at("open/group"), now=Now.MTIME), errno.EPERM),
    (BOB, SetDefaults(at("open/private"), Defaults()), errno.EPERM),
    (ALICE, SetQuota(at("open/private"), 1), errno.EPERM),
    # extended attributes
    (BOB, SetXattr(at("tmp/file"), b"user.x", b""), errno.EACCES),
    (BOB, GetXattr(at("open/group"), b"user.x"), errno.ENODATA),
    (CAROL, GetXattr(at("open/group"), b"user.x"), errno.EACCES),
    (BOB, SetXattr(at("tmp"), b"user.x", b""), errno.EPERM),
    (ALICE, SetXattr(at("tmp/file"), b"trusted.x", b""), errno.EPERM),
    (ALICE, GetXattr(at("tmp/file"), b"trusted.x"), errno.ENODATA),
    (ALICE, SetXattr(at("tmp/file"), b"security.x", b""), errno.EPERM),
    (ALICE, GetXattr(at("tmp/file"), b"security.x"), errno.ENODATA),
]


@pytest.mark.parametrize(("requester", "request_", "expected"), [row for row in AS_USERS if row[2]])
def test_what_users_are_refused(names: Names, requester: Requester, request_: Request, expected: int) -> None:
    assert names.errno(request_, requester) == expected


@pytest.mark.parametrize(("requester", "request_", "expected"), [row for row in AS_USERS if not row[2]])
def test_what_users_are_not_refused(names: Names, requester: Requester, request_: Request, expected: int) -> None:
    assert names.errno(request_, requester) == 0


def test_listing_needs_the_right_to_read_and_its_inodes_the_right_to_search(names: Names) -> None:
    assert names.errno(ListDirectory(names.stat("open/searched").id), BOB) == errno.EACCES
    assert names.errno(ListDirectory(names.stat("open/searched").id), ADMINISTRATOR) == 0


def test_in_a_removed_directory_nothing_is_found_or_made(names: Names) -> None:
    gone = removed_directory(names)
    refused: list[Request] = [
        MakeDirectory(at("x", gone)),
        MakeNode(at("x", gone), Kind.FIFO),
        Symlink(at("x", gone), b"t"),
        Link(at("f"), at("x", gone)),
        Rename(at("f"), at("x", gone)),
        Open(at("x", gone), READ | CREATE),
        Stat(at("x", gone)),
        ListDirectory(gone),
        SetQuota(at("", gone), 1),
    ]
    for request in refused:
        assert names.errno(request) == errno.ENOENT, request
    assert names.ask(Stat(at("", gone)), Found).inode.links == 0
    assert names.ask(Stat(at("..", gone)), Found).inode == names.stat("open")


def test_what_has_no_name_gets_none() -> None:
    with Names() as names:
        names.do(MakeNode(at("f"), Kind.FILE))
        inode = names.stat("f").id
        names.do(Remove(at("f")))
        assert names.errno(Link(PathRef(inode), at("again"))) == errno.ENOENT
        names.check()


def test_a_file_has_only_so_many_names() -> None:
    with Names() as names:
        names.do(MakeNode(at("f"), Kind.FILE))
        inode = names.stat("f")

        async def many(context: Context) -> None:
            context.put(msgspec.structs.replace(inode, links=MAX_LINKS))

        names.run(many)
        assert names.errno(Link(at("f"), at("g"))) == errno.EMLINK


def test_a_file_has_only_so_many_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "MAX_LOCKS", 3)
    with Names() as names:
        names.do(MakeNode(at("f"), Kind.FILE))
        inode = names.stat("f").id
        asked = [Lock(inode, Window.RANGE, 1, LockKind.WRITE, start, start + 1) for start in range(0, 10, 2)]
        assert [names.errno(one) for one in asked] == [0, 0, 0, errno.ENOLCK, errno.ENOLCK]
        assert names.errno(Lock(inode, Window.WHOLE, 1, LockKind.READ)) == errno.ENOLCK
        names.do(Lock(inode, Window.RANGE, 1, LockKind.NONE))
        names.do(asked[-1])


def test_all_extended_attributes_of_an_inode_have_an_end() -> None:
    with Names() as names:
        names.do(MakeNode(at("f"), Kind.FILE), SetXattr(at("f"), b"user.a", b"x" * 65536))
        assert names.errno(SetXattr(at("f"), b"user.b", b"x" * 65536)) == errno.ENOSPC
        names.do(SetXattr(at("f"), b"user.a", b"x"), SetXattr(at("f"), b"user.b", b"x" * 65536))


def test_rows_that_cannot_be_are_told_apart_from_refusals() -> None:
    with Names() as names:
        names.do(MakeNode(at("f"), Kind.FILE))
        key = tables.inode_key(names.stat("f").id)

        async def put(context: Context, value: bytes | None) -> None:
            if value is None:
                context.rows.clear(key)
            else:
                context.rows.set(key, value)

        root = dict(names.rows())[tables.inode_key(ROOT)]
        for value in (None, b"", b"\x02" + root[1:], b"\x01junk", root):
            names.run(lambda context, value=value: put(context, value))
            with pytest.raises(DataCorruption, match=key.hex()):
                names.stat("f")
            with pytest.raises(DataCorruption, match=key.hex()):
                names.do(Remove(at("f")))


def lock(inode: int) -> Request:
    return Lock(inode, Window.RANGE, 1, LockKind.READ)


def test_who_has_listed_a_directory_goes_on_until_it_is_closed_where_a_mount_says_so() -> None:
    mount, user_himself = Requester(8, 1002, 1002), Requester(7, 1002, 1002, by_path=True)
    with Names() as names:
        names.do(MakeDirectory(at("d")), MakeNode(at("d/f"), Kind.FILE))
        directory = names.stat("d").id
        first, later = ListDirectory(directory, limit=1), ListDirectory(directory, b"a", opened=True)
        for requester in (mount, user_himself):
            assert names.errno(first, requester) == 0
        names.do(SetAttributes(at("d"), mode=0o700))
        assert names.ask(later, Listing, mount).entries[0].name == b"f"
        assert names.errno(first, mount) == errno.EACCES
        assert names.errno(later, user_himself) == errno.EACCES


def test_a_number_proves_nothing_to_who_has_not_walked_the_path_to_it() -> None:
    """They are given one after the other, so anybody can guess them."""
    eve = Requester(7, 1002, 1002, by_path=True)
    walked = Requester(8, 1002, 1002)
    with Names() as names:
        names.do(MakeDirectory(at("ada"), 0o700), MakeDirectory(at("ada/in"), 0o777), requester=ALICE)
        names.do(
            MakeNode(at("ada/file"), Kind.FILE, 0o666), MakeNode(at("ada/in/f"), Kind.FILE, 0o666), requester=ALICE
        )
        names.do(MakeNode(at("moved"), Kind.FILE, 0o666), MakeNode(at("linked"), Kind.FILE, 0o666), requester=ALICE)
        names.do(Rename(at("moved"), at("ada/in/moved")), Link(at("linked"), at("ada/in/linked")), requester=ALICE)
        directory, private = names.stat("ada/in").id, names.stat("ada").id
        asked: list[Request] = [
            ListDirectory(directory),
            ListDirectory(directory, opened=True),
            GetSpace(directory),
            Stat(PathRef(directory)),
            Stat(at("f", directory)),
            Stat(at("..", directory)),
            Remove(at("f", directory)),
            MakeDirectory(at("new", directory)),
            RemoveTree(at("in", private)),
            Rename(at("f", directory), at("stolen")),
            Rename(at("ada"), at("new", directory)),
            Link(at("f", directory), at("stolen")),
            SetXattr(at("f", directory), b"user.x", b""),
        ]
        for path in ("ada/file", "ada/in/f", "ada/in/moved", "ada/in/linked"):
            place = PathRef(names.stat(path).id)
            asked += [
                Stat(place),
                Open(place, READ),
                Open(place, WRITE, 1),
                Access(place, 4),
                GetXattr(place, b"user.x"),
            ]
            asked += [Truncate(place, 0), Link(place, at("stolen")), lock(place.base)]
            with pytest.raises(PermissionError):
                names.run(lambda context, place=place: renew(Renew(place.base, 1), context), eve)
        for request in asked:
            assert names.errno(request, eve) == errno.EACCES, request
        unlocking = [Lock(number, Window.RANGE, 1, LockKind.NONE) for number in (directory, 1 << 40)]
        assert [names.errno(request, eve) for request in unlocking] == [0, 0], "which does not say which there are"
        found = names.ask(StatMany((at("f", directory), PathRef(directory))), FoundMany, eve).inodes
        assert found == (errno.EACCES, errno.EACCES)
        assert names.errno(Stat(at("f", directory)), walked) == 0
        assert names.errno(Stat(at("f", directory)), ALICE) == 0
        names.do(SetAttributes(at("ada"), mode=0o711))
        for request in (
            ListDirectory(directory),
            Stat(at("f", directory)),
            Open(PathRef(names.stat("ada/file").id), READ),
        ):
            assert names.errno(request, eve) == 0, request
        names.check()
