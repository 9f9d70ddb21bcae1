"""GPUs under load, by torch: memory byte by byte, products with all of the memory in use, sums over all GPUs."""

from __future__ import annotations

import time
from typing import Any, Final

from fireflyer.base.units import GIB, MIB, format_bytes
from fireflyer.validators.core.checks.evidence import Finding
from fireflyer.validators.core.validation.records import Found

__all__ = ["WHY_NOT", "gpu_allreduce", "gpu_fault", "gpu_memory", "gpu_multiply", "usable_torch"]

WHY_NOT: Final = "torch is not installed, or finds no GPU"
_SIZE: Final = 4096
_BLOCK_BYTES: Final = 256 * MIB
_PATTERNS: Final = (0x00, 0xFF, 0x55, 0xAA)


def usable_torch() -> Any:
    """The module where it finds a GPU; None elsewhere."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def gpu_memory(torch: Any, limit_s: float) -> Found:
    """Each byte of the free memory of each GPU is written with patterns and read back."""
    faults: list[Finding] = []
    tested = 0
    for device in range(torch.cuda.device_count()):
        ends_s = time.monotonic() + limit_s / torch.cuda.device_count()
        blocks = _filled(torch, device)
        tested += len(blocks) * _BLOCK_BYTES
        wrong = 0
        for pattern in _PATTERNS:
            for block in blocks:
                block.fill_(pattern)
            wrong += sum(int((block != pattern).sum().item()) for block in blocks)
            if time.monotonic() > ends_s:
                break
        if wrong:
            words = f"{wrong} bytes were read back other than written"
            faults.append(gpu_fault(torch, device, "wrong_byte", words))
        del blocks
        torch.cuda.empty_cache()
    return Found(
        validator="gpu_memory", faults=tuple(faults), words=f"{format_bytes(tested)} were read back as written"
    )


def gpu_multiply(torch: Any, limit_s: float) -> Found:
    """Products of matrices of small integers, exact in float32 whatever the order of the sums, while all of the memory
    is in use: each must be equal to that of the processor."""
    faults: list[Finding] = []
    figures: dict[str, float] = {}
    generator = torch.Generator().manual_seed(20241)
    left, right = (torch.randint(-8, 8, (_SIZE, _SIZE), generator=generator).float() for _ in range(2))
    expected = left @ right
    for device in range(torch.cuda.device_count()):
        blocks = _filled(torch, device, spare_bytes=2 * GIB)
        a, b, right_result = (one.to(f"cuda:{device}") for one in (left, right, expected))
        count = wrong = 0
        torch.cuda.synchronize(device)
        began_s = time.monotonic()
        while time.monotonic() < began_s + limit_s / torch.cuda.device_count() or not count:
            wrong += not bool(torch.equal(a @ b, right_result))
            count += 1
        took_s = time.monotonic() - began_s
        figures[f"gpu{device}_gemm_flop_per_s"] = 2.0 * _SIZE**3 * count / took_s
        if wrong:
            faults.append(
                gpu_fault(torch, device, "wrong_result", f"{wrong} of {count} products of matrices are wrong")
            )
        del blocks, a, b, right_result
        torch.cuda.empty_cache()
    return Found(validator="gpu_gemm", figures=figures, faults=tuple(faults), words="all products are right")


def gpu_allreduce(torch: Any, limit_s: float, array_bytes: int = 256 * MIB) -> Found:
    """Sums over all GPUs by NCCL, in one process."""
    count = torch.cuda.device_count()
    if count < 2:
        return Found(validator="gpu_allreduce", words="one GPU: nothing to add")
    words = array_bytes // 4
    sources = [torch.full((words,), float(rank + 1), device=f"cuda:{rank}") for rank in range(count)]
    results = [torch.empty_like(source) for source in sources]
    rounds = wrong = 0
    began_s = time.monotonic()
    while time.monotonic() < began_s + limit_s or not rounds:
        torch.cuda.nccl.all_reduce(sources, results)
        rounds += 1
        wrong += sum(not bool((result == count * (count + 1) / 2).all().item()) for result in results)
    took_s = time.monotonic() - began_s
    faults: tuple[Finding, ...] = ()
    if wrong:
        said = f"{wrong} of {rounds * count} sums over {count} GPUs are wrong"
        faults = (Finding(severity="high", cause="wrong_result", words=said, at_once=True),)
    figures = {"gpu_allreduce_bytes_per_s": rounds * array_bytes / took_s}
    return Found(validator="gpu_allreduce", figures=figures, faults=faults, words=f"{rounds} sums are right")


def _filled(torch: Any, device: int, spare_bytes: int = GIB) -> list[Any]:
    """Blocks that take the free memory, but for what kernels need."""
    free, _ = torch.cuda.mem_get_info(device)
    blocks = []
    for _ in range(max(int(free) - spare_bytes, 0) // _BLOCK_BYTES):
        try:
            blocks.append(torch.zeros(_BLOCK_BYTES, dtype=torch.uint8, device=f"cuda:{device}"))
        except torch.cuda.OutOfMemoryError:
            break
    return blocks


def gpu_fault(torch: Any, device: int, cause: str, words: str) -> Finding:
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    serial = f"GPU-{uuid}" if uuid else ""
    return Finding(severity="high", part=f"gpu:{device}", cause=cause, words=words, serial=serial, at_once=True)
