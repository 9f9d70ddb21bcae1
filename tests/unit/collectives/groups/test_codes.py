"""Names that Python spells out are those of the native tables, with their numbers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.support.collectives import calls

from fireflyer import native
from fireflyer.collectives import arrays, kernels
from fireflyer.collectives.codes import DTYPE_CODES, KIND_CODES, OP_CODES, FailureKind
from fireflyer.collectives.flight import trace
from fireflyer.collectives.planning.plan import CANONICAL_KINDS
from fireflyer.collectives.saturation import SATURATING
from fireflyer.collectives.torch.tensors import dtype_name, op_name


def test_the_numbers_are_those_on_the_wire() -> None:
    """Recorded: old and new ranks agree on what has a number already. Append, never renumber."""
    kinds = "none allreduce reduce broadcast barrier reduce_scatter allgather all_to_all gather scatter"
    assert tuple(kinds.split()) == native.OP_KINDS
    assert native.REDUCE_OPS == ("sum", "min", "max", "product", "mean", "band", "bor", "bxor")
    names = ["f64", "f32", "f16", "bf16", "f8e4m3", "f8e5m2", "i32", "i64", "i8", "u8"]
    assert tuple(zip(names, (8, 4, 2, 2, 1, 1, 4, 8, 1, 1), strict=True)) == native.DTYPES


def test_failures_have_their_native_numbers() -> None:
    assert tuple(kind.name.lower() for kind in FailureKind) == native.FAILURE_KINDS
    assert [kind.value for kind in FailureKind] == list(range(len(native.FAILURE_KINDS)))


def test_the_twins_and_the_arrays_have_the_native_types() -> None:
    assert tuple(DTYPE_CODES) == kernels.DTYPES == tuple(arrays.DTYPES)
    assert tuple(OP_CODES) == kernels.OPS
    assert {kernels.accum_dtype(name) for name in SATURATING} == {"f32"}
    assert set(SATURATING) < set(DTYPE_CODES)
    assert set(CANONICAL_KINDS) < set(KIND_CODES)
    assert set(calls.DTYPES) == set(DTYPE_CODES)
    assert set(calls.OPS) == set(OP_CODES)
    assert set(trace._DTYPES) == set(DTYPE_CODES)


def test_torch_reaches_every_type_and_operation() -> None:
    types = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
    types += [torch.int32, torch.int64, torch.int8, torch.uint8]
    assert [dtype_name(one) for one in types] == list(DTYPE_CODES)
    ops = ["SUM", "MIN", "MAX", "PRODUCT", "AVG", "BAND", "BOR", "BXOR"]
    assert [op_name(getattr(dist.ReduceOp, op), torch.int32) for op in ops] == list(OP_CODES)


@pytest.mark.parametrize("what", [(0, 1, 0), (len(KIND_CODES), 1, 0), (-1, 1, 0), (1, 99, 0), (1, -1, 0), (1, 1, 99)])
def test_a_number_that_is_none_is_refused(what: tuple[int, int, int]) -> None:
    from tests.support.collectives.thread_ranks import together

    def body(comm: object) -> None:
        kind, dtype, op = what
        with pytest.raises(ValueError, match="is not known"):
            comm._native.submit(kind, 0, 0, 0, dtype, -1, op)  # type: ignore[attr-defined]

    assert together([0], body) == [None]
