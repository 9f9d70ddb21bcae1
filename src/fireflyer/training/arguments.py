"""The arguments of torch's `DistributedDataParallel`, checked: which count, which change no result, which are refused.

Pure: no communication. What is refused says in one line what to do instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MIB

__all__ = ["Refused", "bucket_bytes_of", "check_devices", "check_module", "ignored_names"]

DEFAULT_BUCKET_BYTES: Final = 25 * MIB


@dataclass(frozen=True, slots=True)
class Refused:
    """Arguments of torch's that this implementation does not have; each must be left at its default."""

    delay_all_reduce_named_params: object = None
    param_to_hook_all_reduce: object = None
    mixed_precision: object = None
    bucket_cap_mb_list: object = None

    def check(self) -> None:
        """Raises `UsageError` for one that was given."""
        delayed = "leave both out: buckets are summed as they fill, and bucket_cap_mb says how large they are"
        hints = {
            "delay_all_reduce_named_params": delayed,
            "param_to_hook_all_reduce": delayed,
            "mixed_precision": "use torch.autocast, or module.to(torch.bfloat16) before wrapping",
            "bucket_cap_mb_list": "all buckets have one size here; pass bucket_cap_mb",
        }
        for name, hint in hints.items():
            if getattr(self, name) is not None:
                raise UsageError(f"{name} is not supported: {hint}")


def bucket_bytes_of(bucket_cap_mb: float | None, bucket_bytes: int | None) -> int:
    """The size of a bucket. Raises `UsageError`."""
    if bucket_cap_mb is not None and bucket_bytes is not None:
        raise UsageError("bucket_cap_mb and bucket_bytes say the same; pass one of them")
    if bucket_cap_mb is not None:
        if not bucket_cap_mb > 0:
            raise UsageError(f"bucket_cap_mb {bucket_cap_mb} must be positive; 25 is usual")
        return max(1, int(bucket_cap_mb * MIB))
    if bucket_bytes is None:
        return DEFAULT_BUCKET_BYTES
    if bucket_bytes < 1:
        raise UsageError(f"bucket_bytes {bucket_bytes} must be positive; 25 MiB is usual")
    return bucket_bytes


def ignored_names(module: torch.nn.Module) -> frozenset[str]:
    """The parameters and buffers that torch's DDP would leave alone: names in `_ddp_params_and_buffers_to_ignore`."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def check_module(module: Any) -> None:
    """Raises `UsageError` for what cannot be wrapped."""
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"cannot wrap a {type(module).__name__}; the first argument is a torch.nn.Module")
    for name, parameter in module.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise UsageError(f"parameter {name!r} has no shape yet; run a forward pass of the module before wrapping")


def check_devices(module: torch.nn.Module, device_ids: Sequence[Any] | None, output_device: Any) -> torch.device | None:
    """The device that inputs are moved to, None where they stay. As with torch, `device_ids` names one device of a
    module that lies on it as a whole. Raises `UsageError`."""
    if not device_ids and output_device is None:
        return None
    devices = sorted({str(parameter.device) for parameter in module.parameters()})
    if len(devices) != 1 or devices[0].startswith("cpu"):
        raise UsageError(
            "device_ids and output_device are for a module on one GPU, but its parameters are on "
            f"{', '.join(devices)}; leave them out, or move the module first"
        )
    own = torch.device(devices[0])
    named = [*(device_ids or ()), *(() if output_device is None else (output_device,))]
    for each in named:
        device = torch.device(own.type, each) if isinstance(each, int) else torch.device(each)
        if device != own:
            raise UsageError(f"the module is on {own}, not on {device}; device_ids has one entry, the module's device")
    return own
