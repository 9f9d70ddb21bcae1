"""Which tensors lie in memory as in a file: found for all of them in one call, and the same as is found for each."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.checkpoint.tensors import DTYPES, can_be_filled, host_tensors, laid_out_tensors
from fireflyer.native import tensors_in_memory

API = torch.Tensor.__dlpack_c_exchange_api__


class Wrapped(torch.Tensor):
    pass


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.zeros(2, 3),
    "of a module": lambda: torch.nn.Parameter(torch.zeros(2, 3)),
    "with a gradient": lambda: torch.zeros(2, 3, requires_grad=True) * 2,
    "a part": lambda: torch.zeros(4, 3)[1:3],
    "every other row": lambda: torch.zeros(4, 3)[::2],
    "by columns": lambda: torch.zeros(3, 2).T,
    "expanded": lambda: torch.zeros(1, 3).expand(2, 3),
    "another shape": lambda: torch.zeros(3, 2),
    "fewer dimensions": lambda: torch.zeros(6),
    "another dtype": lambda: torch.zeros(2, 3, dtype=torch.int32),
    "negated": lambda: torch._neg_view(torch.zeros(2, 3)),
    "a subclass": lambda: torch.zeros(2, 3).as_subclass(Wrapped),
    "sparse": lambda: torch.zeros(2, 3).to_sparse(),
    "without memory": lambda: torch.zeros(2, 3, device="meta"),
    "zeros that are not stored": lambda: torch._efficientzerotensor(2, 3),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_fits_where_its_elements_lie_row_by_row_in_host_memory(kind: str) -> None:
    tensor = TENSORS[kind]()
    found = host_tensors([torch.ones(3), tensor], ["F32", "F32"], [(3,), (2, 3)])

    has_memory = kind not in ("without memory", "zeros that are not stored")
    assert found.fits.tolist() == [True, has_memory and can_be_filled(tensor, "F32", (2, 3))]
    assert found.addresses[1] == (tensor.data_ptr() if found.fits[1] else 0)


def test_a_view_that_conjugates_or_negates_does_not_fit_and_its_neighbours_do() -> None:
    base = torch.zeros(2, 1, dtype=torch.complex64)
    tensors = [base, base.conj(), base[:1].real, base[:1].conj().imag, torch.zeros(1, 1)]
    dtypes, shapes = ["C64", "C64", "F32", "F32", "F32"], [(2, 1), (2, 1), (1, 1), (1, 1), (1, 1)]

    assert host_tensors(tensors, dtypes, shapes).fits.tolist() == [True, False, True, False, True]
    assert laid_out_tensors(tensors, dtypes, shapes).fits.all()  # DLPack does not tell


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_dtype_fit_their_own_and_no_other(dtype: str) -> None:
    tensors = [torch.zeros(2, dtype=DTYPES[dtype]) for _ in DTYPES]

    fits = host_tensors(tensors, list(DTYPES), [(2,)] * len(DTYPES)).fits

    assert [name for name, fit in zip(DTYPES, fits, strict=True) if fit] == [dtype]


@given(
    shape=st.lists(st.integers(0, 3), max_size=4),
    order=st.randoms(use_true_random=False),
    steps=st.lists(st.integers(1, 2), min_size=4, max_size=4),
)
def test_any_strides_are_judged_as_torch_judges_them(shape: list[int], order: random.Random, steps: list[int]) -> None:
    axes = list(range(len(shape)))
    order.shuffle(axes)
    tensor = torch.zeros([2 * size for size in shape]).permute(axes)
    for axis, step in enumerate(steps[: len(shape)]):
        tensor = tensor[(slice(None),) * axis + (slice(0, tensor.shape[axis] // 2 * step, step),)]

    found = host_tensors([tensor], ["F32"], [tuple(tensor.shape)])

    assert bool(found.fits[0]) == tensor.is_contiguous()
    assert found.addresses[0] == (tensor.data_ptr() if tensor.is_contiguous() and tensor.numel() else 0)


def test_arguments_that_are_not_one_for_each_tensor_are_refused() -> None:
    tensors, one, two = [torch.zeros(1)], np.zeros(1, np.uint32), np.zeros(2, np.uint64)
    with pytest.raises(ValueError, match="one shape"):
        tensors_in_memory(API, tensors, (torch.Tensor,), [], one, two[:1])
    with pytest.raises(ValueError, match="addresses has not one element"):
        tensors_in_memory(API, tensors, (torch.Tensor,), [(1,)], one, two)
    with pytest.raises(ValueError, match="PyCapsule"):
        tensors_in_memory("no table", tensors, (torch.Tensor,), [(1,)], one, two[:1])


@pytest.mark.parametrize("shape", [(2**70,), (-1,), ("2",), [1], (1, 1), ()])
def test_a_shape_that_is_no_shape_of_the_tensor_does_not_fit(shape: object) -> None:
    found, addresses = np.ones(1, np.uint32), np.ones(1, np.uint64)

    tensors_in_memory(API, [torch.zeros(1)], (torch.Tensor,), [shape], found, addresses)  # type: ignore[list-item]

    assert (found[0], addresses[0]) == (0, 0)
