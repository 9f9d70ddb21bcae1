"""Sums of gradients that travel in fewer bytes. Pure NumPy; what PyTorch sees of it is in `torch_hooks` and in
`fireflyer.training`.

A *codec* turns float32 values into bytes and back. A codec whose bytes the communicator can add (bf16) is used with one
allreduce: every rank's values are rounded to bf16 once, summed in float32, divided, and rounded to bf16 once more.
Bytes that cannot be added (fp8 with a scale for each block) take two steps:

1. every rank cuts its array into one part for each rank, encodes the parts and sends each to its owner (all_to_all);
   the owner decodes them and adds them up in float32, in ascending order of ranks, and divides by their number;
2. the owner encodes the mean, and all ranks gather all parts (allgather) and decode them.

So each value is rounded twice, and a rank sends 2 (n-1)/n payloads. Gathering everybody's payload instead would round
once, but send n-1 payloads: as much with two ranks, and more with every rank beyond. Both steps are a fixed sequence of
operations on fixed parts: the result is the same on all ranks and in all runs, to the bit.

*Error feedback* keeps what rounding took away and adds it to the next gradient of the same bucket: each rank for its
own gradient and, with two steps, each owner for the mean of its part. What is lost then is delayed, not gone (Seide and
others 2014, Karimireddy and others 2019). It costs 4 bytes for each element, with two steps 4/n more. A residual that
is not finite is dropped, or one overflow would last for ever.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from fireflyer.base.errors import UsageError
from fireflyer.collectives.work import when_there_is_room
from fireflyer.native import dequantize_fp8_blocks, quantize_fp8_blocks, reduce_to_accum, round_from_accum

__all__ = ["Bf16", "Codec", "CompressedMean", "Compression", "Fp8Blocks"]

DEFAULT_BLOCK: Final = 128
_SCALE_BYTES: Final = 4
_ALIGNMENT: Final = 16
_FORMAT: Final = 1
Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class Codec(Protocol):
    """Interface by which float32 values become bytes. Must be deterministic."""

    name: str
    summed_as: str | None
    """The type as which the communicator can add payloads; None: it cannot."""
    unit: int
    """Arrays are cut into parts at multiples of so many elements."""

    def payload_bytes(self, elements: int) -> int: ...

    def encode(self, values: Floats, payload: Bytes) -> None: ...

    def decode(self, payload: Bytes, values: Floats) -> None: ...


class Bf16:
    """2 bytes for each element."""

    name = "bf16"
    summed_as: str | None = "bf16"
    unit = 1

    def payload_bytes(self, elements: int) -> int:
        return 2 * elements

    def encode(self, values: Floats, payload: Bytes) -> None:
        round_from_accum(payload, values, "bf16")

    def decode(self, payload: Bytes, values: Floats) -> None:
        reduce_to_accum(values, [payload], "bf16")


class Fp8Blocks:
    """fp8 e4m3 with one float32 scale, amax / 448, for each block: 1 + 4/block bytes for each element.

    A block with a NaN or an infinity decodes to NaNs.
    """

    summed_as: str | None = None

    def __init__(self, block: int = DEFAULT_BLOCK) -> None:
        if block < 1:
            raise UsageError(f"block {block} must be positive; {DEFAULT_BLOCK} is usual")
        self.name = f"fp8-{block}"
        self.unit = block

    def payload_bytes(self, elements: int) -> int:
        """The codes, then the scales, which begin at a multiple of 4."""
        return self._scales_at(elements) + _SCALE_BYTES * (-(-elements // self.unit))

    def encode(self, values: Floats, payload: Bytes) -> None:
        quantize_fp8_blocks(*self._split(payload, values.size), values, self.unit)

    def decode(self, payload: Bytes, values: Floats) -> None:
        dequantize_fp8_blocks(values, *self._split(payload, values.size), self.unit)

    def _split(self, payload: Bytes, elements: int) -> tuple[Bytes, Floats]:
        return payload[:elements], payload[self._scales_at(elements) : self.payload_bytes(elements)].view(np.float32)

    def _scales_at(self, elements: int) -> int:
        return elements + -elements % _SCALE_BYTES


CODECS: Final[dict[str, Callable[[], Codec]]] = {"bf16": Bf16, "fp8": Fp8Blocks}


class CompressedMean(Protocol):
    """A mean under way. All ranks call `advance` at the same place among their operations, once."""

    def advance(self) -> Sequence[Any]:
        """Waits for the first step, starts the second; the operations that are now under way."""

    def finish(self) -> None:
        """Put the mean into the array, when all parts are done."""


class Compression:
    """Says how gradients travel, and keeps the residuals of error feedback. One for each model and communicator.

    >>> DistributedDataParallel(model, comm, compression=Compression("fp8", error_feedback=True))

    `codec` is "bf16", "fp8", or an object with the methods of `Codec`.
    """

    def __init__(self, codec: str | Codec, *, error_feedback: bool = False) -> None:
        if isinstance(codec, str):
            if codec not in CODECS:
                raise UsageError(f"codec {codec!r} is not known; use one of {', '.join(CODECS)}, or an object")
            self.codec: Codec = CODECS[codec]()
        else:
            self.codec = codec
        self.error_feedback = error_feedback
        self._buckets: dict[str, _Bucket] = {}
        self._loaded: dict[str, Floats] = {}

    def __repr__(self) -> str:
        return f"Compression({self.codec.name!r}, error_feedback={self.error_feedback})"

    def start(self, comm: Any, key: str, array: Floats) -> CompressedMean:
        """Starts the mean over all ranks of float32 `array`, which is replaced by it in `finish`. Collective.

        `key` names the bucket: it must be the same on all ranks and in all steps.
        """
        bucket = self._buckets.get(key)
        if bucket is None or bucket.array_size != array.size:
            kind = _Exchanged if self.codec.summed_as is None else _Summed
            bucket = self._buckets[key] = kind(comm, self, array.size)
            bucket.restore({name: self._loaded.pop(f"{key}/{name}", None) for name in bucket.residuals})
        bucket.begin(array)
        return bucket

    def state_dict(self) -> dict[str, Any]:
        """The residuals of this rank: they belong into its own part of a checkpoint."""
        residuals = {
            f"{key}/{name}": value.copy()
            for key, bucket in self._buckets.items()
            for name, value in bucket.residuals.items()
        }
        return {"format": _FORMAT, "codec": self.codec.name, "residuals": residuals | self._loaded}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises `UsageError` for the state of another codec. Residuals of other buckets than before are dropped."""
        if state.get("format") != _FORMAT or state.get("codec") != self.codec.name:
            raise UsageError(f"the residuals are of codec {state.get('codec')!r}, this is {self.codec.name!r}")
        self._loaded = {key: np.array(value, dtype=np.float32) for key, value in state["residuals"].items()}
        self._buckets.clear()


class _Bucket(ABC):
    """Buffers and residuals of one bucket."""

    def __init__(self, compression: Compression, array_size: int) -> None:
        self.array_size = array_size
        self.residuals: dict[str, Floats] = {}
        self._codec = compression.codec
        self._feedback = compression.error_feedback
        self._array: Floats = np.empty(0, np.float32)

    def restore(self, residuals: Mapping[str, Floats | None]) -> None:
        for name, values in residuals.items():
            if values is not None and values.size == self.residuals[name].size:
                self.residuals[name][:] = values

    @abstractmethod
    def begin(self, array: Floats) -> None: ...

    @abstractmethod
    def advance(self) -> Sequence[Any]: ...

    @abstractmethod
    def finish(self) -> None: ...

    def _encode(self, values: Floats, payload: Bytes, kept: Floats | None) -> None:
        """With the residual `kept`: adds it to `values`, and leaves there what is lost now."""
        if kept is None:
            self._codec.encode(values, payload)
            return
        with np.errstate(invalid="ignore", over="ignore"):
            values += kept
            self._codec.encode(values, payload)
            self._codec.decode(payload, kept)
            np.subtract(values, kept, out=kept)
        np.nan_to_num(kept, copy=False, nan=0.0, posinf=0.0, neginf=0.0)


class _Summed(_Bucket):
    def __init__(self, comm: Any, compression: Compression, array_size: int) -> None:
        super().__init__(compression, array_size)
        self._comm = comm
        self._sum = comm.empty(array_size, self._codec.summed_as)
        if self._feedback:
            self.residuals = {"own": np.zeros(array_size, np.float32)}
        self._works: list[Any] = []

    def begin(self, array: Floats) -> None:
        self._array = array
        self._encode(array, self._sum.view(np.uint8), self.residuals.get("own"))
        self._works = [self._comm.allreduce(self._sum, op="mean", dtype=self._codec.summed_as, async_op=True)]

    def advance(self) -> Sequence[Any]:
        return self._works

    def finish(self) -> None:
        self._codec.decode(self._sum.view(np.uint8), self._array)


class _Exchanged(_Bucket):
    def __init__(self, comm: Any, compression: Compression, array_size: int) -> None:
        super().__init__(compression, array_size)
        self._comm = comm
        ranks = comm.world_size
        unit = self._codec.unit
        self._part = -(-array_size // (ranks * unit)) * unit
        payload = self._codec.payload_bytes(self._part)
        padded = payload + -payload % _ALIGNMENT
        self._values = np.zeros(self._part * ranks, np.float32)
        self._mean = np.zeros(self._part, np.float32)
        self._sent, self._received, self._gathered = (comm.empty(padded * ranks, "u8") for _ in range(3))
        self._own = comm.empty(padded, "u8")
        for buffer in (self._sent, self._own):
            buffer[:] = 0  # its gaps travel too
        self._sends, self._receives, self._gathers = (
            [part[:payload] for part in np.split(buffer, ranks)]
            for buffer in (self._sent, self._received, self._gathered)
        )
        self._parts = np.split(self._values, ranks)
        self._payload = self._own[:payload]
        if self._feedback:
            self.residuals = {
                "own": np.zeros(self._values.size, np.float32),
                "mean": np.zeros(self._part, np.float32),
            }
        self._works: list[Any] = []

    def begin(self, array: Floats) -> None:
        self._array = array
        self._values[: array.size] = array
        self._values[array.size :] = 0
        kept = self.residuals.get("own")
        rests = [None] * len(self._parts) if kept is None else np.split(kept, len(self._parts))
        for part, payload, rest in zip(self._parts, self._sends, rests, strict=True):
            self._encode(part, payload, rest)
        self._works = [self._comm.all_to_all(self._received, self._sent, async_op=True)]

    def advance(self) -> Sequence[Any]:
        for work in self._works:
            work.wait()
        term = np.empty_like(self._mean)
        self._mean[:] = 0
        with np.errstate(invalid="ignore", over="ignore"):
            for payload in self._receives:
                self._codec.decode(payload, term)
                self._mean += term
            self._mean /= np.float32(self._comm.world_size)
        self._encode(self._mean, self._payload, self.residuals.get("mean"))
        spread = partial(self._comm.allgather, self._gathered, self._own, async_op=True)
        self._works = [when_there_is_room(spread)]  # all ranks have begun
        return self._works

    def finish(self) -> None:
        for part, payload in zip(self._parts, self._gathers, strict=True):
            self._codec.decode(payload, part)
        self._array[:] = self._values[: self.array_size]
