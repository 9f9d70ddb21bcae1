"""3FS: a strongly consistent, replicated chunk store, and the file system on it.

    with fireflyer.fs.connect("ff:///directory/of/ff-fs-up") as fs:
        with fs.open("/data/a", "wb") as file: ...

`connect` gives the blocking face, `connect_async` the one for asyncio; `fireflyer.fs.client` has the chunk store alone.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fireflyer.fs.client.connecting import connect, connect_async
    from fireflyer.fs.client.files.open_file_table import FileOptions

__all__ = ["FileOptions", "connect", "connect_async"]


def __getattr__(name: str) -> Any:
    # When it is wanted: storage processes and managers import this package too, and need no client.
    if name in ("connect", "connect_async"):
        from fireflyer.fs.client import connecting

        return getattr(connecting, name)
    if name == "FileOptions":
        from fireflyer.fs.client.files.open_file_table import FileOptions

        return FileOptions
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
