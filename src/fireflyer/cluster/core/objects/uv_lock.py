"""From a `uv.lock` to a requirements file with hashes: what the lock says of the project's dependencies. Pure.

    the project ──dependencies──> packages ──dependencies, with markers and extras──> packages
    each package that is reached: `name==version ; marker` with all hashes of its files

A package is wanted where one of the ways to it is: a way where all of its markers hold. So the requirement's marker is
an `or` of `and`s, which pip and uv evaluate for the Python that they install into, and one lock does for nodes of
several kinds. Everything that is installed is listed, so nothing is looked for beside it (`--no-deps`).

*Not taken*: the project itself (its files travel as the snapshot), its extras and dependency groups, and what has no
hash: packages from version control or directories, other members of a workspace. Each is one line that says what to do.
Format: `uv.lock`, version 1 (revisions only add).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Annotated, Final, NamedTuple

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_toml
from fireflyer.base.errors import UsageError

__all__ = ["requirements_of"]

MAX_PACKAGES: Final = 10_000
MAX_WAYS: Final = 64
"""To one package, by different markers."""
MAX_STEPS: Final = 200_000
_ELSE: Final = "or make a requirements file: `uv export --format requirements-txt -o requirements.lock`"

_Text = Annotated[str, msgspec.Meta(max_length=4096)]
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,200}[A-Za-z0-9])?")
_VERSION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]{0,200}")
_HASH: Final = re.compile(r"sha(256:[0-9a-f]{64}|384:[0-9a-f]{96}|512:[0-9a-f]{128})")
_URL: Final = re.compile(r"https?://[^\s'\"\\]{1,2000}")
_MARKER: Final = re.compile(r"[A-Za-z0-9_.'\" <>=!~()+*,-]{1,1000}")
_OF_EXTRAS: Final = re.compile(r"\bextra\b")


class _Source(msgspec.Struct, frozen=True):
    registry: _Text = ""
    url: _Text = ""
    git: _Text = ""
    path: _Text = ""
    directory: _Text = ""
    editable: _Text = ""
    virtual: _Text = ""

    @property
    def project(self) -> str:
        """Directory of a project that the lock is of."""
        return self.virtual or self.editable


class _File(msgspec.Struct, frozen=True):
    hash: _Text = ""


class _Dependency(msgspec.Struct, frozen=True):
    name: _Text
    version: _Text = ""
    source: _Source | None = None
    marker: _Text = ""
    extra: tuple[_Text, ...] = ()


class _Package(msgspec.Struct, frozen=True, rename="kebab"):
    name: _Text
    source: _Source
    version: _Text = ""
    dependencies: tuple[_Dependency, ...] = ()
    optional_dependencies: dict[str, tuple[_Dependency, ...]] = {}
    sdist: _File | None = None
    wheels: tuple[_File, ...] = ()


class _Manifest(msgspec.Struct, frozen=True):
    requirements: tuple[_Dependency, ...] = ()
    """Of a script; a project has a package of its own."""


class _Lock(msgspec.Struct, frozen=True):
    version: int
    package: Annotated[tuple[_Package, ...], msgspec.Meta(max_length=MAX_PACKAGES)] = ()
    manifest: _Manifest = _Manifest()


_Way = tuple[str, ...]
"""Markers, sorted, that hold together."""


class _Wanted(NamedTuple):
    package: int
    extra: str
    """Empty: the package itself."""


def requirements_of(data: bytes) -> bytes:
    """Of a lock file's bytes. Raises `UsageError`."""
    try:
        lock = decode_toml(data, _Lock)
    except DECODE_ERRORS as error:
        raise UsageError(f"the uv.lock cannot be read ({error}); make it again: uv lock") from None
    if lock.version != 1:
        raise UsageError(f"the uv.lock has format version {lock.version}, this release reads 1; {_ELSE}")
    ways = _Ways(lock).all()
    lines = [_requirement(lock.package[number], ways[number]) for number in sorted(ways)]
    return b"# of a uv.lock\n" + "".join(sorted(lines)).encode()


class _Ways:
    """To the packages that are wanted, from the project's dependencies on."""

    def __init__(self, lock: _Lock) -> None:
        self._lock = lock
        self._by_name: dict[str, list[int]] = {}
        for number, package in enumerate(lock.package):
            self._by_name.setdefault(package.name, []).append(number)
        self._found: dict[_Wanted, list[_Way]] = {}
        self._todo: deque[tuple[_Wanted, _Way]] = deque()

    def all(self) -> dict[int, list[_Way]]:
        self._follow(self._first(), ())
        steps = 0
        while self._todo:
            wanted, way = self._todo.popleft()
            if way not in self._found[wanted]:
                continue  # a wider one was found
            steps += 1
            if steps > MAX_STEPS:
                raise UsageError(f"the uv.lock has more dependencies than are followed ({MAX_STEPS}); {_ELSE}")
            package = self._lock.package[wanted.package]
            of_extra = package.optional_dependencies.get(wanted.extra, ())
            self._follow(of_extra if wanted.extra else package.dependencies, way)
        return {wanted.package: ways for wanted, ways in self._found.items() if not wanted.extra}

    def _first(self) -> Iterable[_Dependency]:
        if self._lock.manifest.requirements:
            return self._lock.manifest.requirements
        projects = [package for package in self._lock.package if package.source.project]
        here = [package for package in projects if package.source.project == "."]
        if len(here or projects) != 1:
            raise UsageError(f"the uv.lock is of {len(projects)} projects, none of which is its directory's; {_ELSE}")
        return (here or projects)[0].dependencies

    def _follow(self, dependencies: Iterable[_Dependency], way: _Way) -> None:
        for one in dependencies:
            further = tuple(sorted({*way, _marker(one)} - {""}))
            for package in self._named(one):
                for extra in ("", *one.extra):
                    self._add(_Wanted(package, extra), further)

    def _named(self, one: _Dependency) -> list[int]:
        found = [
            number
            for number in self._by_name.get(one.name, [])
            if (not one.version or self._lock.package[number].version == one.version)
            and (one.source is None or self._lock.package[number].source == one.source)
        ]
        if not found:
            raise UsageError(f"the uv.lock names {one.name[:80]!r} and has no such package; make it again: uv lock")
        return found

    def _add(self, wanted: _Wanted, way: _Way) -> None:
        known = self._found.setdefault(wanted, [])
        if any(set(other) <= set(way) for other in known):
            return
        known[:] = [other for other in known if not set(way) <= set(other)]
        known.append(way)
        if len(known) > MAX_WAYS:
            name = self._lock.package[wanted.package].name
            raise UsageError(f"the uv.lock reaches {name[:80]!r} by more than {MAX_WAYS} markers; {_ELSE}")
        self._todo.append((wanted, way))


def _marker(one: _Dependency) -> str:
    if one.marker and (_MARKER.fullmatch(one.marker) is None or one.marker.count("(") != one.marker.count(")")):
        raise UsageError(f"the uv.lock has a marker for {one.name[:80]!r} that is none; make it again: uv lock")
    if _OF_EXTRAS.search(one.marker):
        raise UsageError(f"the uv.lock has extras that conflict ({one.name[:80]!r}), which is not supported; {_ELSE}")
    return one.marker


def _requirement(package: _Package, ways: list[_Way]) -> str:
    name, source = package.name, package.source
    if _NAME.fullmatch(name) is None:
        raise UsageError(f"the uv.lock names a package {name[:80]!r}, which is no name; make it again: uv lock")
    if source.git or source.directory or source.project or source.path:
        kind = "version control" if source.git else "a directory or file of your machine"
        raise UsageError(
            f"{name} of the uv.lock comes from {kind}, so nodes cannot get it by a hash; take it from an index, or put "
            "its code into the task's directory and make the lock without it"
        )
    if source.url and _URL.fullmatch(source.url) is None:
        raise UsageError(f"{name} of the uv.lock has a URL that is none; make it again: uv lock")
    if not source.url and _VERSION.fullmatch(package.version) is None:
        raise UsageError(f"{name} of the uv.lock has no version; make it again: uv lock")
    hashes = sorted({file.hash for file in _files(package)})
    if not hashes or any(_HASH.fullmatch(one) is None for one in hashes):
        raise UsageError(
            f"{name} of the uv.lock has files without a hash, so nodes would install what is there today; take it from "
            "an index that gives hashes, and make the lock again"
        )
    what = f"{name} @ {source.url}" if source.url else f"{name}=={package.version}"
    return "".join([f"{what}{_condition(ways)}", *(f" \\\n    --hash={one}" for one in hashes), "\n"])


def _files(package: _Package) -> Iterator[_File]:
    yield from package.wheels
    if package.sdist is not None:
        yield package.sdist


def _condition(ways: list[_Way]) -> str:
    if () in ways:
        return ""
    return " ; " + " or ".join("(" + " and ".join(f"({marker})" for marker in way) + ")" for way in sorted(ways))
