"""Parameters in memory that the ranks of a node share, so that an operation on all of them copies nothing.

One flat tensor for each dtype, of which `parameter.data` become views. What changes values in place (optimizers,
`load_state_dict`) keeps them there; what gives a parameter other memory is found by `check`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from fireflyer.base.errors import UsageError
from fireflyer.training.buckets import dense_strides, tensor_for_sums
from fireflyer.training.communication import Communicator

__all__ = ["SharedParameters"]

_ALIGNMENT: Final = 16
"""Elements: every parameter begins at a multiple of at least 32 bytes."""
_MAX_NAMES: Final = 8


class SharedParameters:
    """Moves `parameters`, which are on the CPU and of types that can be summed, there; their values stay.

    Raises `UsageError` where one is on a device, or where the communicator has not enough of that memory.
    """

    def __init__(self, parameters: Sequence[tuple[str, torch.nn.Parameter]], comm: Communicator) -> None:
        self.flats: list[torch.Tensor] = []
        """What `broadcast` of a communicator takes, complex numbers as pairs."""
        self._parameters = tuple(parameters)
        for name, parameter in parameters:
            if parameter.device.type != "cpu":
                raise UsageError(
                    f"parameter {name!r} is on {parameter.device}; leave parameters_in_shared_memory out, or keep the "
                    "module on the CPU"
                )
        for dtype in dict.fromkeys(parameter.dtype for _, parameter in parameters):
            self._move([parameter for _, parameter in parameters if parameter.dtype == dtype], comm)
        self._addresses = [parameter.data_ptr() for _, parameter in parameters]

    @property
    def size_bytes(self) -> int:
        return sum(flat.numel() * flat.element_size() for flat in self.flats)

    def check(self) -> None:
        """Raises `UsageError` if a parameter has got other memory since."""
        moved = [
            name
            for (name, parameter), address in zip(self._parameters, self._addresses, strict=True)
            if parameter.data_ptr() != address
        ]
        if moved:
            raise UsageError(
                f"the memory of parameters was replaced after wrapping: {moved[:_MAX_NAMES]}; change values in place, "
                "as optimizers and load_state_dict do, or wrap again"
            )

    def _move(self, parameters: Sequence[torch.nn.Parameter], comm: Communicator) -> None:
        begins = [0]
        for parameter in parameters:
            begins.append(begins[-1] + -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT)
        summed, flat = tensor_for_sums(comm, begins[-1], parameters[0].dtype, parameters[0].device)
        summed.zero_()
        self.flats.append(summed)
        with torch.no_grad():
            for begin, parameter in zip(begins, parameters, strict=False):
                view = flat[begin : begin + parameter.numel()].as_strided(parameter.shape, dense_strides(parameter))
                view.copy_(parameter)
                parameter.data = view
