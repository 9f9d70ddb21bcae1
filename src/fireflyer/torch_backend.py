"""Makes "hfreduce" known to `torch.distributed` when torch is imported: the entry point of the group `torch.backends`.

torch calls `register` at the end of its own import, in every process that imports it. So this module imports nothing
when it is loaded, and what a group needs is imported when the first group is made. An error here would break
`import torch`: it becomes a warning.
"""

from __future__ import annotations

from typing import Any

__all__ = ["register"]


def register() -> None:
    """`TORCH_DEVICE_BACKEND_AUTOLOAD=0` turns such calls off; then import `fireflyer.collectives.torch_group`."""
    try:
        import torch.distributed as dist

        if dist.is_available() and not hasattr(dist.Backend, "HFREDUCE"):
            dist.Backend.register_backend("hfreduce", _create, extended_api=True, devices=["cpu", "cuda"])
    except Exception as error:
        import warnings

        warnings.warn(f"fireflyer could not register the backend hfreduce: {error}", RuntimeWarning, stacklevel=2)


def _create(backend: Any, options: Any) -> Any:
    from fireflyer.collectives.torch_group import create

    return create(backend, options)
