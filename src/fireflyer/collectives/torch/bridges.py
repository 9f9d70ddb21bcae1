"""What a rank can learn of the bridges of its GPU: from torch which GPUs it reaches, from the driver how many links.

Torch has no call for links, so `nvidia-smi`, which comes with the driver, is asked. Whatever goes wrong is a reason for
having no pairs, never an error of the group. **None of this has met a GPU yet**: see docs/design/0011-gpu-path.md.
"""

from __future__ import annotations

import logging
import subprocess
from typing import Any, Final

import msgspec
import numpy as np
import torch

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import UsageError
from fireflyer.collectives.communicator import Communicator
from fireflyer.collectives.devices.bridges import Decision, Report, decide, links_of

__all__ = ["find_pairs", "gpu_name", "probe"]

_COMMAND: Final = "nvidia-smi"
_ANSWER_TIMEOUT_S: Final = 10
_REPORT_BYTES: Final = 8 * 1024

logger = logging.getLogger(__name__)


def find_pairs(comm: Communicator) -> Decision:
    """The pairs for the GPUs that are current on each rank; none, with the reason, where not all of them have partners.
    The same on all ranks. Collective. Raises as operations of `comm` do."""
    decision = decide(_told_to_all(comm, probe()), comm.plan.node_of_rank)
    if comm.rank == 0:
        logger.info("nvlink_pairs=%s reason=%s", list(decision.pairs), decision.reason)
    return decision


def probe() -> Report:
    """Of this process and its current CUDA device."""
    if not torch.cuda.is_available():
        return Report(problem="its process has no CUDA device")
    try:
        own = torch.cuda.current_device()
        visible = [index for index in range(torch.cuda.device_count()) if index != own]
        reached = [index for index in visible if torch.cuda.can_device_access_peer(own, index)]
        names = _answer("--query-gpu=uuid", "--format=csv,noheader").split("\n")
        links = links_of(_answer("topo", "-m"), [name.strip().removeprefix("GPU-") for name in names if name.strip()])
        gpu = gpu_name(own)
        return Report(gpu, dict(links.get(gpu, {})), tuple(gpu_name(index) for index in reached))
    except Exception as error:  # a driver may fail in any way, and pairs only make things faster
        return Report(problem=" ".join(str(error).split())[:500] or type(error).__name__)


def gpu_name(device: int) -> str:
    """The same for all processes of a machine, whichever number the GPU has in them."""
    return str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")


def _answer(*arguments: str) -> str:
    ended = subprocess.run(
        [_COMMAND, *arguments], capture_output=True, timeout=_ANSWER_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
    )
    if ended.returncode != 0:
        raise UsageError(f"{_COMMAND} {' '.join(arguments)} exited with code {ended.returncode}")
    return ended.stdout.decode(errors="replace")


def _told_to_all(comm: Communicator, own: Report) -> list[Report]:
    mine: Any = np.zeros(_REPORT_BYTES, np.uint8)
    text = msgspec.json.encode(own)
    if len(text) > _REPORT_BYTES:
        text = msgspec.json.encode(Report(problem="it has more GPUs than fit into its report"))
    mine[: len(text)] = np.frombuffer(text, np.uint8)
    every: Any = np.zeros((comm.world_size, _REPORT_BYTES), np.uint8)
    comm.allgather(every, mine)
    return [_decoded(row.tobytes().rstrip(b"\0")) for row in every]


def _decoded(text: bytes) -> Report:
    try:
        return decode_json(text, Report)
    except DECODE_ERRORS as error:
        return Report(problem=f"its report is not readable ({error})")
