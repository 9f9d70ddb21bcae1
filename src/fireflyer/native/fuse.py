"""The mount's extension, which needs libfuse3: `UsageError` where it was not built or the library is not there."""

from fireflyer.base.errors import UsageError

try:
    from fireflyer.native._fuse import FuseMemory, FuseSession, detach
except ImportError as error:
    raise UsageError(
        f"mounting is not part of this build ({error}); on Debian: apt-get install libfuse3-dev fuse3, then build again"
    ) from None

__all__ = ["FuseMemory", "FuseSession", "detach"]
