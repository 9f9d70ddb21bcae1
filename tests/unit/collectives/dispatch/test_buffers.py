"""Memory of dispatches is used again, and never while somebody refers to it."""

import gc
from typing import Any

import numpy as np
import numpy.typing as npt

from fireflyer.collectives.dispatch.buffers import ResultBuffers, StepBuffers

ROWS, WIDTH = 512, 256
FLOATS = np.dtype(np.float32)


def address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def test_the_memory_of_a_result_is_used_again_when_its_last_view_is_gone() -> None:
    results = ResultBuffers()
    first = results.take((ROWS, WIDTH), FLOATS)
    view, place = first[3:].view(np.int32), address(first)
    del first
    assert address(results.take((ROWS, WIDTH), FLOATS)) != place  # the view still refers to it
    del view
    gc.collect()
    again = [results.take((ROWS, WIDTH), FLOATS) for _ in range(2)]
    assert place in map(address, again)


def test_two_results_that_are_used_never_share_memory() -> None:
    results = ResultBuffers()
    kept = [results.take((ROWS, WIDTH), FLOATS) for _ in range(6)]
    for number, one in enumerate(kept):
        one[:] = number
    assert [one.min() for one in kept] == [one.max() for one in kept] == list(range(6))


def test_a_result_is_not_put_into_memory_of_more_than_twice_its_size() -> None:
    results = ResultBuffers()
    place = address(results.take((8 * ROWS, WIDTH), FLOATS))
    assert address(results.take((ROWS, WIDTH), FLOATS)) != place


def test_a_step_gets_the_buffer_of_its_name_again_while_it_is_large_enough() -> None:
    steps = StepBuffers()
    place = address(steps.take("rows", 1000))
    assert address(steps.take("rows", 900)) == place
    assert address(steps.take("sums", 900)) != place
    assert steps.take("rows", 5000).size == 5000
