"""What a rank does in the tests of our `DistributedDataParallel` against torch's: `python -m
tests.support.torch_ranks.ddp_conformance JSON`. Each program runs with torch's class over gloo, and with ours."""

from __future__ import annotations

import hashlib
import json
import sys
import traceback
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tests.support.torch_ranks.ddp_programs import BEYOND_TORCH, COMPILED, PROGRAMS, SHARED, Program
from torch.nn.parallel import DistributedDataParallel as TorchDdp

import fireflyer.collectives.torch_group  # noqa: F401 - registers the backend hfreduce
from fireflyer.training import DistributedDataParallel as OurDdp


def outcome(program: Program, ddp: Any) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [tensor.detach().clone() for tensor in program(ddp)]


def digest(tensors: list[torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def ours_alone(program: Program) -> dict[str, Any]:
    tensors = outcome(program, OurDdp)
    return {"tensors": len(tensors), "ours": digest(tensors)}


def compare(program: Program, ours: Any = OurDdp) -> dict[str, Any]:
    """`difference`: the largest one, relative to the largest value of its tensor; `same`: no bit differs."""
    expected = outcome(program, TorchDdp)
    found = outcome(program, ours)
    assert [(t.shape, t.dtype) for t in expected] == [(t.shape, t.dtype) for t in found]
    pairs = list(zip(found, expected, strict=True))
    return {
        "tensors": len(pairs),
        "ours": digest(found),
        "same": all(torch.equal(a.isnan(), b.isnan()) and torch.equal(filled(a), filled(b)) for a, b in pairs),
        "difference": max(difference(filled(a), filled(b)) for a, b in pairs),
    }


def filled(tensor: torch.Tensor) -> torch.Tensor:
    """With numbers in the place of NaN."""
    return tensor.nan_to_num() if tensor.is_floating_point() else tensor


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


shared = partial(OurDdp, parameters_in_shared_memory=True)


def alone(module: torch.nn.Module) -> torch.nn.Module:
    """In place of our class: averages nothing."""
    return module


def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group(arguments["backend"], timeout=timedelta(seconds=60))
    programs = PROGRAMS | COMPILED | BEYOND_TORCH
    results: dict[str, Any] = {}
    for name in arguments["programs"]:
        if not arguments["compare"]:
            results[name] = ours_alone(programs[name])
            continue
        print(f"rank {dist.get_rank()}: {name}", file=sys.stderr, flush=True)
        try:
            results[name] = compare(programs[name.removesuffix(SHARED)], shared if name.endswith(SHARED) else OurDdp)
        except Exception:
            results[name] = {"tensors": 0, "same": False, "error": traceback.format_exc()}
    if arguments["compare"]:
        results["not wrapped"] = compare(PROGRAMS["a_script_of_torchrun"], alone)
    dist.destroy_process_group()
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
