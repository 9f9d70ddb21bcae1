"""Objects in memory, for simulations, and trees of files for snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from fireflyer.base.errors import NotFound, UsageError
from fireflyer.base.ports import Data
from fireflyer.cluster.core.objects.blobs import StoredBlob, hash_of
from fireflyer.cluster.objects.port import Objects, checked_pieces

__all__ = ["MemoryObjects", "make_tree", "read_tree"]


class MemoryObjects(Objects):
    """`step` is called before each operation: a simulation lets others go on there."""

    def __init__(self, now_ns: Callable[[], int] = lambda: 0, step: Callable[[], None] = lambda: None) -> None:
        self.now_ns = now_ns
        self.step = step
        self.blobs: dict[str, bytes] = {}
        self.times: dict[str, int] = {}

    def put(self, blob: str, size_bytes: int, pieces: Iterable[Data]) -> bool:
        self.step()
        if blob in self.blobs:
            self.times[blob] = self.now_ns()
            return False
        data = b"".join(bytes(piece) for piece in pieces)
        if len(data) != size_bytes or hash_of(data) != blob:
            raise UsageError(f"blob {blob[:12]}… has other bytes than its name")
        self.blobs[blob] = data
        self.times[blob] = self.now_ns()
        return True

    def get(self, blob: str) -> Iterator[bytes]:
        self.step()
        if blob not in self.blobs:
            raise NotFound(f"blob {blob[:12]}… is not there")
        return checked_pieces(blob, iter([self.blobs[blob]]), "memory")

    def stat(self, blob: str) -> StoredBlob:
        if blob not in self.blobs:
            raise NotFound(f"blob {blob[:12]}… is not there")
        return StoredBlob(blob, len(self.blobs[blob]), self.times[blob])

    def renew(self, blobs: Sequence[str]) -> list[bool]:
        self.step()
        for blob in blobs:
            if blob in self.blobs:
                self.times[blob] = self.now_ns()
        return [blob in self.blobs for blob in blobs]

    def delete(self, blobs: Sequence[str], renewed_before_ns: int) -> list[str]:
        self.step()
        deleted = [blob for blob in blobs if blob in self.blobs and self.times[blob] < renewed_before_ns]
        for blob in deleted:
            del self.blobs[blob], self.times[blob]
        return deleted

    def discard(self, blob: str) -> None:
        self.blobs.pop(blob, None)
        self.times.pop(blob, None)

    def list(self) -> Iterator[StoredBlob]:
        for blob in sorted(self.blobs):
            self.step()
            if blob in self.blobs:
                yield self.stat(blob)


def make_tree(root: Path, files: Mapping[str, str]) -> Path:
    """Files by path; a value `-> target` makes a link, a path with a slash at its end a directory."""
    root.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.endswith("/"):
            place.mkdir(exist_ok=True)
        elif text.startswith("-> "):
            place.symlink_to(text[3:])
        else:
            place.write_text(text)
    return root


def read_tree(root: Path) -> dict[str, str]:
    """As `make_tree` takes it; of directories only those that are empty."""
    found = {}
    for place in sorted(root.rglob("*")):
        path = str(place.relative_to(root))
        if place.is_symlink():
            found[path] = f"-> {place.readlink()}"
        elif place.is_dir():
            if not any(place.iterdir()):
                found[f"{path}/"] = ""
        else:
            found[path] = place.read_text()
    return found
