"""What operations on names leave behind: times, owners, modes, links, layouts, lists."""

from __future__ import annotations

import errno

import msgspec
import pytest
from tests.support.fs.clusters.names import ADMINISTRATOR, Names, at, user

from fireflyer.fs.core.meta.context import ClusterDefaults, Context
from fireflyer.fs.core.meta.dispatch import carry_out, make_root
from fireflyer.fs.core.meta.tables import ENTRIES, INODES
from fireflyer.fs.schema.inodes import ROOT, Defaults, DirectoryDetails, FileDetails, Inode, Kind
from fireflyer.fs.schema.meta import (
    Found,
    FoundMany,
    GetXattr,
    Link,
    ListDirectory,
    Listing,
    ListXattrs,
    MakeDirectory,
    MakeNode,
    Now,
    Open,
    Opened,
    OpenFlag,
    PathRef,
    ReadLink,
    Remove,
    RemoveDirectory,
    RemoveXattr,
    Rename,
    RenameFlag,
    Request,
    SetAttributes,
    SetDefaults,
    SetXattr,
    Stat,
    StatMany,
    Symlink,
    Target,
    XattrValue,
)
from fireflyer.fs.schema.meta import XattrNames as ValueNames

ALICE, BOB = user(1001, 1001, 500), user(1002)


def begin(names: Names) -> None:
    names.do(MakeDirectory(at("d")), MakeDirectory(at("e")), MakeDirectory(at("d/s")), MakeNode(at("d/f"), Kind.FILE))
    names.do(MakeNode(at("e/g"), Kind.FILE), Symlink(at("d/l"), b"f"), MakeDirectory(at("e/empty")))


# Paths whose mtime and ctime are those of the operation, and those of which only the ctime is. Nothing else's times
# change. POSIX names them for each function.
TIMES: list[tuple[Request, str, str]] = [
    (MakeDirectory(at("d/new")), "d d/new", ""),
    (MakeNode(at("d/new"), Kind.FIFO), "d d/new", ""),
    (Open(at("d/new"), OpenFlag.CREATE | OpenFlag.READ), "d d/new", ""),
    (Open(at("d/f"), OpenFlag.CREATE | OpenFlag.READ), "", ""),
    (Symlink(at("d/new"), b"x"), "d d/new", ""),
    (Link(at("d/f"), at("e/new")), "e", "d/f e/new"),
    (Remove(at("d/f")), "d", ""),
    (RemoveDirectory(at("e/empty")), "e", ""),
    (Rename(at("d/f"), at("d/new")), "d", "d/new"),
    (Rename(at("d/f"), at("e/new")), "d e", "e/new"),
    (Rename(at("d/s"), at("e/empty")), "d e", "e/empty"),
    (Rename(at("d/f"), at("e/g"), RenameFlag.EXCHANGE), "d e", "d/f e/g"),
    (Rename(at("d/f"), at("d/f")), "", ""),
    (SetAttributes(at("d/f"), mode=0o600), "", "d/f"),
    (SetAttributes(at("d/f"), uid=5), "", "d/f"),
    (SetAttributes(at("d/f"), now=Now.MTIME), "d/f", ""),
    (SetAttributes(at("d/f"), now=Now.ATIME), "", "d/f"),
    (SetAttributes(at("d/l"), follow=False, uid=5), "", "d/l"),
    (SetAttributes(at("d/l"), uid=5), "", "d/f"),
    (SetXattr(at("d/f"), b"user.x", b"1"), "", "d/f"),
    (SetDefaults(at("d"), Defaults(stripe=1)), "", "d"),
    (Stat(at("d/f")), "", ""),
    (ReadLink(at("d/l")), "", ""),
]


@pytest.mark.parametrize(("request_", "modified", "changed"), TIMES)
def test_times_that_an_operation_marks(request_: Request, modified: str, changed: str) -> None:
    with Names() as names:
        begin(names)
        before = names.now_ns
        names.do(request_)
        found = dict(tree(names))
        assert {path for path, inode in found.items() if inode.mtime_ns > before} == set(modified.split())
        assert {path for path, inode in found.items() if inode.ctime_ns > before} == set(
            (modified + " " + changed).split()
        )
        names.check()


def tree(names: Names, top: str = "") -> list[tuple[str, Inode]]:
    found: list[tuple[str, Inode]] = []
    for entry in names.ask(ListDirectory(names.stat("/" + top).id, inodes=True), Listing).entries:
        path = f"{top}/{entry.name.decode()}".strip("/")
        assert entry.inode is not None
        found.append((path, entry.inode))
        if entry.kind is Kind.DIRECTORY:
            found += tree(names, path)
    return found


def test_times_can_be_set_before_1970() -> None:
    with Names() as names:
        begin(names)
        names.do(SetAttributes(at("d/f"), atime_ns=-5, mtime_ns=-7))
        inode = names.stat("d/f")
        assert (inode.atime_ns, inode.mtime_ns, inode.ctime_ns) == (-5, -7, names.now_ns - 1000)


def test_a_create_reads_its_directory_and_the_name_and_writes_three_rows() -> None:
    """What a create costs is what the store is asked for."""
    with Names() as names:
        asked: list[bytes] = []

        async def body(context: Context) -> None:
            rows, get, put = context.rows, context.rows.get, context.rows.set

            async def noted(key: bytes) -> bytes | None:
                asked.append(key[:2])
                return await get(key)

            def noted_set(key: bytes, value: bytes) -> None:
                asked.append(b"=" + key[:2])
                put(key, value)

            context.rows = Noted(rows, noted, noted_set)  # type: ignore[assignment]
            request = Open(at("f"), OpenFlag.CREATE | OpenFlag.READ)
            await carry_out(request, context)

        names.run(body)
        assert asked == [INODES, ENTRIES, b"=" + INODES, b"=" + ENTRIES, b"=" + INODES]


class Noted:
    def __init__(self, rows: object, get: object, put: object) -> None:
        self.get, self.set = get, put


def test_what_is_made_belongs_to_who_made_it_or_to_the_group_of_the_directory() -> None:
    with Names() as names:
        names.do(MakeDirectory(at("s")), SetAttributes(at("s"), gid=700, mode=0o2777))
        names.do(
            MakeDirectory(at("s/d"), 0o6750),
            Open(at("s/f"), OpenFlag.CREATE | OpenFlag.READ, 0, 0o2755),
            Open(at("s/g"), OpenFlag.CREATE | OpenFlag.READ, 0, 0o2745),
            Open(at("h"), OpenFlag.CREATE | OpenFlag.READ, 0, 0o6755),
            MakeDirectory(at("plain"), 0o7777),
            Symlink(at("s/l"), b"x"),
            requester=ALICE,
        )
        made = {path: (inode.uid, inode.gid, oct(inode.mode)) for path, inode in tree(names)}
        assert made["s/d"] == (1001, 700, "0o2750")
        assert made["s/f"] == (1001, 700, "0o755")  # the user is not in the group
        assert made["s/g"] == (1001, 700, "0o2745")
        assert made["h"] == (1001, 1001, "0o6755")
        assert made["plain"] == (1001, 1001, "0o1777")
        assert made["s/l"] == (1001, 700, "0o777")
        names.do(Open(at("s/r"), OpenFlag.CREATE | OpenFlag.READ, 0, 0o2755))
        assert names.stat("s/r").mode == 0o2755


def test_rights_that_a_mode_gives_fall_when_the_owner_changes() -> None:
    with Names() as names:
        for name, mode in (("f", 0o6755), ("g", 0o6745), ("d", 0o6755)):
            make = MakeDirectory(at(name)) if name == "d" else MakeNode(at(name), Kind.FILE)
            names.do(make, requester=ALICE)
            names.do(SetAttributes(at(name), mode=mode), requester=ALICE)
        names.do(SetAttributes(at("f"), gid=500), requester=ALICE)
        assert names.stat("f").mode == 0o755
        names.do(SetAttributes(at("g"), gid=500), requester=ALICE)
        assert names.stat("g").mode == 0o2745
        names.do(SetAttributes(at("d"), gid=500), requester=ALICE)
        assert names.stat("d").mode == 0o6755
        names.do(SetAttributes(at("g"), uid=7, gid=7), requester=ADMINISTRATOR)
        assert names.stat("g").mode == 0o2745
        names.do(SetAttributes(at("f"), mode=0o2755, gid=1001), requester=ALICE)
        assert names.stat("f").mode == 0o2755
        names.do(SetAttributes(at("f"), uid=1001, gid=800))
        names.do(SetAttributes(at("f"), mode=0o2755), requester=ALICE)
        assert names.stat("f").mode == 0o755


def test_names_of_one_file_are_one_file() -> None:
    with Names() as names:
        begin(names)
        inode = names.ask(Link(at("d/f"), at("e/again")), Found).inode
        assert inode.links == 2
        names.do(Rename(at("d/f"), at("e/again")))  # both stay, as POSIX has it
        assert names.stat("d/f") == names.stat("e/again")
        names.do(Remove(at("d/f")))
        assert names.stat("e/again").links == 1
        assert names.stat("e/again").ctime_ns > inode.ctime_ns
        names.do(Link(at("d/l"), at("e/l")))
        assert names.stat("e/l").kind is Kind.SYMLINK
        names.do(Link(at("e/again"), at("d/f")), Link(at("d/l"), at("e/file"), follow=True))
        assert names.stat("e/file").id == inode.id
        names.check()


def test_what_is_unlinked_is_still_there_by_its_number() -> None:
    with Names() as names:
        begin(names)
        file, directory = names.stat("d/f").id, names.stat("e/empty").id
        names.do(Remove(at("d/f")), RemoveDirectory(at("e/empty")))
        for inode in (file, directory):
            assert names.ask(Stat(PathRef(inode)), Found).inode.links == 0
        assert names.ask(Stat(at("..", directory)), Found).inode.id == names.stat("e").id
        names.do(SetAttributes(PathRef(file), mode=0o600))
        names.check()


def test_a_rename_replaces_at_once_and_an_exchange_swaps() -> None:
    with Names() as names:
        begin(names)
        f, g, s, empty = (names.stat(path).id for path in ("d/f", "e/g", "d/s", "e/empty"))
        names.do(Rename(at("d/f"), at("e/g")))
        assert names.stat("e/g").id == f
        assert names.ask(Stat(PathRef(g)), Found).inode.links == 0
        names.do(Rename(at("d/s"), at("e/empty")))
        assert names.stat("e/empty").id == s
        assert names.stat("e/empty/..").id == names.stat("e").id
        names.do(Rename(at("e/empty"), at("d/l"), RenameFlag.EXCHANGE))
        assert names.stat("d/l/..").id == names.stat("d").id
        assert names.stat("e/empty").kind is Kind.SYMLINK
        assert (names.directory("d").subdirectories, names.directory("e").subdirectories) == (1, 0)
        assert names.ask(Stat(PathRef(empty)), Found).inode.links == 0
        names.do(MakeNode(at("d/g"), Kind.FILE), Rename(at("d/l"), at("d/g"), RenameFlag.EXCHANGE))
        assert (names.stat("d/g").id, names.directory("d").subdirectories) == (s, 1)
        names.check()


def test_new_files_have_the_layout_of_their_directory_or_of_the_cluster() -> None:
    with Names(cluster=ClusterDefaults(table=3, chains=6, chunk_bytes=1 << 20, stripe=4)) as names:
        names.do(MakeDirectory(at("d")), SetDefaults(at("d"), Defaults(chunk_bytes=1 << 17, stripe=9, trash_s=5)))
        names.do(MakeDirectory(at("d/s")), MakeNode(at("d/s/f"), Kind.FILE), MakeNode(at("f"), Kind.FILE))
        assert names.directory("d/s").defaults == Defaults(1 << 17, 9, 5)
        layouts = []
        for path in ("d/s/f", "f"):
            body = names.stat(path).body
            assert isinstance(body, FileDetails)
            layouts.append((body.layout.table, body.layout.chunk_bytes, body.layout.stripe))
        assert layouts == [(3, 1 << 17, 6), (3, 1 << 20, 4)]


def test_creating_through_a_link_that_leads_nowhere_makes_what_it_names() -> None:
    with Names() as names:
        begin(names)
        names.do(Symlink(at("to"), b"e/made"), Symlink(at("again"), b"/to"))
        create = OpenFlag.CREATE | OpenFlag.READ
        assert names.errno(Open(at("again"), create)) == errno.ELOOP
        opened = names.ask(Open(at("again"), create | OpenFlag.FOLLOW), Opened)
        assert opened.created
        assert names.stat("e/made").id == opened.inode.id
        assert not names.ask(Open(at("again"), create | OpenFlag.FOLLOW), Opened).created
        names.do(Open(at("e/zero"), create, 0, 0), requester=ALICE)  # who makes it may use it
        names.check()


def test_pages_of_a_directory_name_everything_once_whatever_comes_and_goes() -> None:
    with Names() as names:
        names.do(MakeDirectory(at("d")))
        directory = names.stat("d").id
        for number in range(0, 40, 2):
            names.do(MakeNode(at(f"d/{number:02d}"), Kind.FILE))
        found: list[bytes] = []
        after, more = b"", True
        while more:
            page = names.ask(ListDirectory(directory, after, 3, inodes=True), Listing)
            assert page.parent == ROOT
            for entry in page.entries:
                assert entry.inode == names.stat(b"d/" + entry.name)
                found.append(entry.name)
                after = entry.name
            more = page.more
            number = len(found)
            names.do(MakeNode(at(f"d/{number:02d}x"), Kind.FILE), Remove(at(b"d/" + found[0])))
            names.do(MakeNode(at(b"d/" + found[0]), Kind.FILE))
        kept = [name for name in found if len(name) == 2]
        assert kept == [b"%02d" % number for number in range(0, 40, 2)]
        assert len(set(found)) == len(found)


def test_who_may_list_and_not_search_gets_names_without_inodes() -> None:
    with Names() as names:
        begin(names)
        names.do(SetAttributes(at("d"), mode=0o744))
        for requester, whole in ((BOB, False), (ADMINISTRATOR, True)):
            entries = names.ask(ListDirectory(names.stat("d").id, inodes=True), Listing, requester).entries
            assert [entry.name for entry in entries] == [b"f", b"l", b"s"]
            assert all((entry.inode is not None) is whole for entry in entries)


def test_names_are_bytes_in_the_order_of_bytes() -> None:
    with Names() as names:
        odd = [b"\x01", b" ", b"A", b"a", b"a\nb", b"\xc3\xa9", b"\xff" * 255]
        for name in reversed(odd):
            names.do(MakeNode(at(name), Kind.FILE))
        assert [entry.name for entry in names.ask(ListDirectory(ROOT), Listing).entries] == odd
        last = names.ask(ListDirectory(ROOT, odd[-2]), Listing)
        assert ([entry.name for entry in last.entries], last.more) == ([odd[-1]], False)
        names.check()


def test_many_places_are_looked_at_at_once() -> None:
    with Names() as names:
        begin(names)
        names.do(MakeDirectory(at("p"), 0o700))
        names.do(MakeNode(at("p/f"), Kind.FILE))
        d, p, f = (names.stat(path).id for path in ("d", "p", "d/f"))
        places = [
            at("f", d),
            at("l", d),
            at("nothing", d),
            at("f", p),
            at("f", f),
            at("f", 999),
            at("..", d),
            at("d/f"),
        ]
        places += [at("n" * 256, d), PathRef(f), at("f/", d), at("a\0", d)]
        for follow in (True, False):
            found = names.ask(StatMany(tuple(places), follow), FoundMany, ALICE).inodes
            for place, inode in zip(places, found, strict=True):
                alone = names.errno(Stat(place, follow), ALICE)
                assert inode == (alone or names.ask(Stat(place, follow), Found, ALICE).inode)


def test_extended_attributes() -> None:
    with Names() as names:
        begin(names)
        names.do(SetAttributes(at("d/f"), mode=0o644))
        for name in (b"user.b", b"trusted.a", b"security.c", b"user.a"):
            names.do(SetXattr(at("d/f"), name, b"<" + name + b">"))
        names.do(SetXattr(at("d"), b"user.d", b""))
        assert names.ask(GetXattr(at("d/l"), b"user.b"), XattrValue, BOB).value == b"<user.b>"
        assert names.ask(GetXattr(at("d/f"), b"security.c"), XattrValue, BOB).value == b"<security.c>"
        assert names.ask(GetXattr(at("d/f"), b"trusted.a"), XattrValue).value == b"<trusted.a>"
        assert set(names.ask(ListXattrs(at("d/f")), ValueNames).names) == {
            b"user.a", b"user.b", b"trusted.a", b"security.c"
        }  # fmt: skip
        assert set(names.ask(ListXattrs(at("d/f")), ValueNames, BOB).names) == {b"user.a", b"user.b", b"security.c"}
        assert names.ask(ListXattrs(at("d/l"), follow=False), ValueNames).names == ()
        names.do(RemoveXattr(at("d/f"), b"user.b"))
        assert names.errno(GetXattr(at("d/f"), b"user.b")) == errno.ENODATA
        assert names.ask(GetXattr(at("d"), b"user.d"), XattrValue).value == b""
        names.check()


def test_an_absolute_link_begins_at_the_root_and_a_relative_one_where_it_is() -> None:
    with Names() as names:
        begin(names)
        names.do(Symlink(at("d/s/up"), b"../f"), Symlink(at("e/abs"), b"/d/s/up"), Symlink(at("e/root"), b"/"))
        file = names.stat("d/f").id
        for path in ("d/s/up", "e/abs", "e/root/d/f", "e/root//d/./s/../f", "/e/root/../d/f", "d/../../d/f"):
            assert names.stat(path, follow=True).id == file, path
        assert names.ask(ReadLink(at("e/abs")), Target).path == b"/d/s/up"
        assert names.stat("e/root", follow=True).id == ROOT
        assert names.stat("e/root/").id == ROOT
        names.do(Symlink(at("d/file"), b"f/"), Symlink(at("d/directory"), b"s/"))
        assert names.errno(Stat(at("d/file"))) == errno.ENOTDIR
        assert names.stat("d/directory", follow=True).kind is Kind.DIRECTORY


def test_the_root_is_made_once() -> None:
    with Names() as names:
        root = names.stat("/")

        async def again(context: Context) -> bool:
            return await make_root(context.rows, now_ns=1, mode=0)

        assert names.run(again) is False
        assert names.stat("/") == root
        assert isinstance(root.body, DirectoryDetails)
        assert msgspec.structs.replace(root, mode=0o777) == root
