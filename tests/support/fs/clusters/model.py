"""A file system in a few lines, to compare with: objects in dictionaries, everything counted anew when it is asked for.

As root, without symbolic links; with quota trees that have no limits, with the trash, with trees removed at once.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["Model", "Node"]

Path = tuple[str, ...]
TRASH = ".trash"


@dataclass(eq=False)
class Node:
    id: int
    names: dict[str, Node] | None
    """None: a file."""
    is_area: bool = False
    trash_s: int = 0
    expires_s: dict[str, int] = field(default_factory=dict)
    """Of a trash: when what is in it goes."""


class Refused(Exception):
    pass


def refuse(number: int) -> Refused:
    return Refused(number)


class Model:
    def __init__(self) -> None:
        self.root = Node(1, {})
        self.now_s = 0

    # --- what there is ---

    def walk(self, node: Node | None = None, path: Path = ()) -> Iterator[tuple[Path, Node]]:
        node = node or self.root
        yield path, node
        for name, below in sorted((node.names or {}).items()):
            yield from self.walk(below, (*path, name))

    def links(self, node: Node) -> int:
        return sum(other is node for _, other in self.walk())

    def quota_tree(self, path: Path) -> Node | None:
        """The innermost one of what is at the path."""
        return next((node for node in reversed(self._along(path)) if node.is_area), None)

    def _along(self, path: Path) -> list[Node]:
        nodes = [self.root]
        for name in path:
            names = nodes[-1].names
            if names is None:
                raise refuse(errno.ENOTDIR)
            if name not in names:
                raise refuse(errno.ENOENT)
            nodes.append(names[name])
        return nodes

    def _directory(self, path: Path) -> tuple[Node, dict[str, Node]]:
        node = self._along(path)[-1]
        if node.names is None:
            raise refuse(errno.ENOTDIR)
        return node, node.names

    # --- operations: they raise `Refused` ---

    def make(self, path: Path, made: Node) -> None:
        directory, names = self._directory(path[:-1])
        if path[-1] in names:
            raise refuse(errno.EEXIST)
        names[path[-1]] = made
        if made.names is not None:
            made.trash_s = directory.trash_s

    def link(self, existing: Path, path: Path) -> None:
        node = self._along(existing)[-1]
        _, names = self._directory(path[:-1])
        if path[-1] in names:
            raise refuse(errno.EEXIST)
        if node.names is not None:
            raise refuse(errno.EPERM)
        if self.quota_tree(existing) is not self.quota_tree(path[:-1]):
            raise refuse(errno.EXDEV)
        names[path[-1]] = node

    def unlink(self, path: Path) -> None:
        node = self._along(path)[-1]
        if node.names is not None:
            raise refuse(errno.EISDIR)
        self._keep(path, node)
        self._take(path)

    def rmdir(self, path: Path) -> None:
        node = self._along(path)[-1]
        if node.names is None:
            raise refuse(errno.ENOTDIR)
        if node.names:
            raise refuse(errno.ENOTEMPTY)
        self._take(path)

    def remove_tree(self, path: Path) -> None:
        node = self._along(path)[-1]
        if node.names is None:
            raise refuse(errno.ENOTDIR)
        self._keep(path, node)
        self._take(path)

    def rename(self, source: Path, target: Path, exchange: bool) -> None:
        _, from_names = self._directory(source[:-1])
        _, to_names = self._directory(target[:-1])
        moved, other = from_names.get(source[-1]), to_names.get(target[-1])
        if moved is None or (exchange and other is None):
            raise refuse(errno.ENOENT)
        if moved in self._along(target[:-1]):
            raise refuse(errno.EINVAL)
        if other is not None and other in self._along(source[:-1]):
            raise refuse(errno.EINVAL if exchange else errno.ENOTEMPTY)
        if moved is other:
            return
        if other is not None and not exchange:
            if moved.names is not None and other.names is None:
                raise refuse(errno.ENOTDIR)
            if moved.names is None and other.names is not None:
                raise refuse(errno.EISDIR)
        self._replace(source, target, moved, other, exchange)

    def _replace(self, source: Path, target: Path, moved: Node, other: Node | None, exchange: bool) -> None:
        _, from_names = self._directory(source[:-1])
        _, to_names = self._directory(target[:-1])
        if other is not None and other.names and not exchange:
            raise refuse(errno.ENOTEMPTY)
        if self.quota_tree(source[:-1]) is not self.quota_tree(target[:-1]):
            raise refuse(errno.EXDEV)
        if other is not None and not exchange:
            self._keep(target, other)
        del from_names[source[-1]]
        to_names[target[-1]] = moved
        if exchange and other is not None:
            from_names[source[-1]] = other

    def set_quota(self, path: Path, on: bool) -> None:
        node, _ = self._directory(path)
        if not on and not node.is_area:
            raise refuse(errno.ENODATA)
        if on and not node.is_area:
            self._check_names_outside(path, node)
        node.is_area = on

    def _check_names_outside(self, path: Path, head: Node) -> None:
        within = [node for _, node in self.walk(head) if node.names is None]
        if any(within.count(node) != self.links(node) for node in within):
            raise refuse(errno.EXDEV)

    def set_trash(self, path: Path, seconds: int) -> None:
        self._directory(path)[0].trash_s = seconds

    def expire(self) -> None:
        for node in [node for _, node in self.walk()]:
            for name, at_s in list(node.expires_s.items()):
                if at_s <= self.now_s:
                    del node.expires_s[name]
                    (node.names or {}).pop(name, None)

    def _keep(self, path: Path, node: Node) -> None:
        """In the trash too, as what has several names: `_take` then takes the other one."""
        directory, _ = self._directory(path[:-1])
        if not directory.trash_s or self.links(node) > 1 or node.names == {}:
            return
        head = self.quota_tree(path[:-1]) or self.root
        assert head.names is not None
        trash = head.names.get(TRASH)
        if trash is not None and trash in self._along(path[:-1]):
            return
        trash = head.names.setdefault(TRASH, Node(0, {}))
        assert trash.names is not None
        own = trash.names.setdefault("0", Node(0, {}))
        assert own.names is not None
        kept_as = f"{path[-1]}~{node.id}"
        own.names[kept_as] = node
        own.expires_s[kept_as] = self.now_s + directory.trash_s

    def _take(self, path: Path) -> None:
        del self._directory(path[:-1])[1][path[-1]]
