"""Data parallelism: every rank has the whole model, computes gradients of its share of the batch, and averages them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from fireflyer.base.errors import UsageError
from fireflyer.collectives.compression import Compression
from fireflyer.collectives.torch_devices import reaching
from fireflyer.training.arguments import Refused, bucket_bytes_of, check_devices, check_module, ignored_names
from fireflyer.training.comm_hooks import CommHook
from fireflyer.training.communication import Communicator
from fireflyer.training.overlap import Interval
from fireflyer.training.process_groups import chosen_group, communicator_beside, default_group
from fireflyer.training.reducer import REDUCED_DTYPES, GradientReducer, ReducerStats, in_backward
from fireflyer.training.replicas import broadcast_tensors, describe_tensor, verify_same_description
from fireflyer.training.shared_parameters import SharedParameters
from fireflyer.training.uneven_inputs import JoinedRank, agreed_root, any_rank

__all__ = ["DistributedDataParallel"]

_disable_dynamo: Final[Any] = torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001 - torch.compiler.disable would import dynamo here
_MADE_ANEW: Final = ("_comm", "_reducer", "_shared", "process_group")
"""Attributes that belong to a process: a copy makes its own."""


class DistributedDataParallel(torch.nn.Module, Joinable):
    """Wraps `module` so that `backward()` leaves the same averaged gradients on every rank.

    In place of torch's class of that name, with its arguments:

    >>> dist.init_process_group("gloo")
    >>> model = DistributedDataParallel(GPT(config))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> model(tokens).backward(); optimizer.step(); optimizer.zero_grad()

    or with a communicator: `DistributedDataParallel(module, comm)`. What differs from torch is in
    docs/how-to/pytorch.md.

    *Who.* The ranks of `process_group` (of any backend; None: the default group) or of `device_mesh`, over a
    communicator that is made beside the group once and serves all models of the group; or of `comm`.

    Construction is collective: it checks that all ranks wrap the same parameters and buffers (names, order, shapes,
    dtypes) with the same options, raising `UsageError` on all of them otherwise, and copies rank 0's values to the
    others. `init_sync=False` does neither; all ranks must then have the same values.

    *Gradients.* Each is averaged over ranks in the communicator's fixed order: summed and divided in float32 at least,
    then rounded once to the gradient's dtype (so float16 does not overflow where the average does not). With a loss
    that is a mean over equal shares of a batch they equal those of one process on the whole batch up to the order of
    additions: relative 1e-5 or absolute 1e-6 in float32. The same seed, plan and number of ranks give the same bits in
    every run. `grad` becomes a view into a bucket, so keep a clone of what must outlive the next `backward()`;
    `zero_grad` works either way. With `gradient_as_bucket_view=False`, as is torch's default, `grad` has memory of its
    own: a copy more, and the memory of all gradients once more. Gradients accumulated before (`no_sync`, or no
    `zero_grad`) are part of what is averaged. What counts is how the forward pass ran: outside of `no_sync`, and
    through this wrapper.

    *Parameters* are float64, float32, bfloat16, float16, complex64 or complex128, also mixed. Those that are frozen, or
    named in `_ddp_params_and_buffers_to_ignore`, stay local; shared ones are summed once. A parameter without a
    gradient in a pass is an error that all ranks raise together, unless `find_unused_parameters` or `static_graph`:
    then it counts as zero, and where no rank has used it its `grad` stays as it was. Without these a pass that reaches
    no parameter at all, as that of `torch.autograd.grad`, is left alone. `static_graph=True` promises that all passes
    use the same parameters equally often; the sums of the first pass do not overlap.

    *Compression* (`fireflyer.collectives.compression.Compression`) makes float32 gradients travel in fewer bytes.

    *Devices.* Gradients on a CUDA device have their buckets there and are summed in host memory, while others are
    computed and copied. They are not compressed.

    *Buffers* (batch norm statistics) are copied from rank 0 before a forward pass, if the one before was to be
    synchronised, as torch does; not with `forward_sync_buffers=False` or `broadcast_buffers=False`, of which the
    second leaves them out of the copy at construction, too.

    *Memory.* Gradients take their size once, in the communicator's shared memory (`size_bytes`). With
    `parameters_in_shared_memory` parameters are moved there, too: then copies of all of them, at construction and at
    the end of `join()`, read where they lie and need no staging buffer. Not by default: a step of training sends no
    parameters, and that memory may be scarce. Values must then be changed in place, as optimizers and
    `load_state_dict` do; another memory of a parameter is an error at the next forward pass.

    Arguments that change no result (`dim`, `check_reduction`, `batched_grad_copy`, `skip_all_reduce_unused_params`) are
    taken and have no effect. Raises `UsageError` for those that are not supported.

    Errors of the communicator (`PeerFailed`, `Timeout`, ...) leave `backward()`, `forward()` or the constructor with
    their own class; the communicator is then unusable.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | Communicator | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,  # noqa: ARG002 - torch's; it has no effect there either
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: object = None,
        param_to_hook_all_reduce: object = None,
        mixed_precision: object = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,  # noqa: ARG002 - it changes no result
        bucket_cap_mb_list: object = None,
        batched_grad_copy: bool = False,  # noqa: ARG002 - it changes no result
        forward_sync_buffers: bool | None = None,
        *,
        comm: Communicator | None = None,
        bucket_bytes: int | None = None,
        compression: Compression | None = None,
        parameters_in_shared_memory: bool = False,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        check_module(module)
        Refused(delay_all_reduce_named_params, param_to_hook_all_reduce, mixed_precision, bucket_cap_mb_list).check()
        if device_ids is not None and not isinstance(device_ids, Sequence):
            if comm is not None:
                raise UsageError(f"device_ids is a {type(device_ids).__name__}; it is a list of one device")
            comm, device_ids = device_ids, None
        self.module = module
        self.dim = dim
        self._bucket_bytes = bucket_bytes_of(bucket_cap_mb, bucket_bytes)
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.parameters_to_ignore = ignored_names(module)
        self.forward_sync_buffers = (
            forward_sync_buffers if forward_sync_buffers is not None else (broadcast_buffers is not False)
        )
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._inputs_to = check_devices(module, device_ids, output_device)
        self._compression = compression
        self._shares_parameters = parameters_in_shared_memory
        self._now_ns = now_ns
        self._divide_by_initial_world_size = True
        if comm is not None and (process_group is not None or device_mesh is not None):
            raise UsageError("comm and process_group both name the ranks; pass one of them")
        self.process_group = None if comm is not None else chosen_group(process_group, device_mesh)
        self._comm = self._communicator(comm)
        if init_sync:
            verify_same_description(self._comm, self._describe())
        self._prepare()
        if init_sync:
            buffers = broadcast_buffers is not False or forward_sync_buffers is not None
            self._copy_state(0, buffers=buffers)

    # --- what torch's class has, too ---

    @_disable_dynamo(recursive=False)  # type: ignore[untyped-decorator]
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own forward pass, after buffers were brought in line with rank 0's."""
        inputs, kwargs = self._before_forward(inputs, kwargs)
        outer = TorchDdp._active_ddp_module  # noqa: SLF001 - lets dynamo cut its graphs where buckets end
        TorchDdp._active_ddp_module = self  # type: ignore[assignment]  # noqa: SLF001
        try:
            output = _run(self.module, inputs, kwargs)
        finally:
            TorchDdp._active_ddp_module = outer  # noqa: SLF001
        return self._after_forward(output)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes of forward passes that run inside only accumulate; the next one averages the sum."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Lets `hook(state, bucket)` average the gradients, as torch's class does: `bucket` has the methods of
        `torch.distributed.GradBucket`, the future that is returned holds the new gradients. Once, on all ranks, before
        the first `backward()`. Raises `UsageError`."""
        self._reducer.use(CommHook(state, hook))

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context in which ranks may run out of inputs at different steps; see torch's class. The ranks of a process
        group only: it is what `Join` counts the ranks over. Raises `UsageError`."""
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinedRank:
        """Hook for `Join`, also with other `Joinable`s. Takes `divide_by_initial_world_size`, by default True."""
        self._divide_by_initial_world_size = bool(kwargs.get("divide_by_initial_world_size", True))
        self._reducer.ranks = None if self._divide_by_initial_world_size else lambda: self._comm.world_size
        return JoinedRank(self._take_part, self._end_join)

    @property
    def join_device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        if self.process_group is None:
            raise UsageError("join() needs a process group: wrap with process_group= in place of a communicator")
        return self.process_group

    @property
    def broadcast_buffers(self) -> bool:
        """An older name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @property
    def bucket_bytes_cap(self) -> int:
        """Bytes at which dynamo cuts a graph that it compiles, so that sums start before the backward pass has ended.
        It refuses less than its own first bucket (1 MiB)."""
        return max(self._bucket_bytes, dist._DEFAULT_FIRST_BUCKET_BYTES)  # type: ignore[attr-defined]  # noqa: SLF001

    @property
    def device(self) -> torch.device:
        return self.join_device

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward pass copies buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self._buffers_kept_equal())

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is None or self.process_group is not default_group():
            raise UsageError(
                "only a model that was wrapped with the default process group can be copied or pickled; copy or pickle "
                "model.module, and wrap that"
            )
        return {name: value for name, value in self.__dict__.items() if name not in _MADE_ANEW}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Where the process group has not been used before this is collective. Nothing is compared or copied."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group = chosen_group(None, None)
        self._comm = self._communicator(None)
        self._prepare()

    def _set_static_graph(self) -> None:
        """As torch's; `static_graph=True` is the same."""
        self.static_graph = True
        self._reducer.learn_graph()

    # --- what it has not ---

    def stats(self) -> ReducerStats:
        """Bytes reduced and how far the sums ran beside the backward pass, since construction."""
        return self._reducer.stats()

    @property
    def size_bytes(self) -> int:
        """Memory of the communicator that this model uses: its gradients, and its parameters if they are there. On the
        CPU the ranks of a node share it, and the arena of the communicator must have as much for all its models."""
        return self._reducer.size_bytes + (0 if self._shared is None else self._shared.size_bytes)

    @property
    def communicator(self) -> Communicator:
        """Communicator over which gradients are summed: that which was given, or that beside the process group."""
        return self._comm

    @property
    def last_pass(self) -> Interval | None:
        """Time in which the last backward pass that averaged was computing: (start, last gradient) in ns of `now_ns`,
        by default those of `Communicator.records()`; None before the first. For `overlap.overlap_of`."""
        return self._reducer.last_pass

    @property
    def buckets(self) -> list[tuple[str, ...]]:
        """The names of the parameters in each bucket, in the order of their allreduces."""
        return self._reducer.bucket_names

    # --- inside ---

    def _communicator(self, given: Communicator | None) -> Communicator:
        comm = given
        if comm is None:
            assert self.process_group is not None  # noqa: S101 - chosen above
            comm = communicator_beside(self.process_group)
        for name, tensor in self._tensors():
            try:
                comm = reaching(comm, {tensor.device.type})
            except UsageError as error:
                raise UsageError(f"{name!r} is on {tensor.device}; {error}") from None
        return comm

    def _prepare(self) -> None:
        self._shared = SharedParameters(self._shareable(), self._comm) if self._shares_parameters else None
        self._known = self._parameter_states()
        self._reducer = GradientReducer(
            [
                (name, parameter)
                for name, parameter in self.module.named_parameters()
                if parameter.requires_grad and name not in self.parameters_to_ignore
            ],
            self._comm,
            bucket_bytes=self._bucket_bytes,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            compression=self._compression,
            now_ns=self._now_ns,
        )

    @_disable_dynamo  # type: ignore[untyped-decorator]
    def _before_forward(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        self._reducer.check_no_pass_broke_off()
        if torch.is_grad_enabled():
            self._check_parameters_unchanged()
        work = Join.notify_join_context(self)
        if work is not None and not self._divide_by_initial_world_size:
            self._reducer.ranks = lambda: int(work.get_future().wait()[0].item())
        joining = self._join_config.enable
        if self.will_sync_module_buffers() and not in_backward():
            self._copy_buffers(agreed_root(self._comm, True) if joining else 0)
        if joining:
            any_rank(self._comm, self.require_backward_grad_sync)
        if self._inputs_to is not None:
            moved, named = _to_kwargs(inputs, kwargs, self._inputs_to, False)
            return moved[0], named[0]
        return inputs, kwargs

    @_disable_dynamo  # type: ignore[untyped-decorator]
    def _after_forward(self, output: Any) -> Any:
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if self.require_forward_param_sync:
            self._reducer.arm()
            for tensor in _tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._on_output_gradient)  # type: ignore[no-untyped-call]
        return output

    def _on_output_gradient(self, _: torch.Tensor) -> None:
        # From here the end of the pass is that of the whole backward(). Were it first asked for by a parameter inside a
        # reentrant activation checkpoint, it would be the end of that inner pass.
        self._reducer.begin()

    def _take_part(self) -> None:
        """One step of ranks that have inputs still, in the order of their operations."""
        if self.will_sync_module_buffers():
            self._copy_buffers(agreed_root(self._comm, False))
        self.require_forward_param_sync = any_rank(self._comm, False)
        if self.require_forward_param_sync:
            self._reducer.take_part()

    def _end_join(self, is_last: bool) -> None:
        root = agreed_root(self._comm, is_last)
        self._copy_state(root, buffers=self.forward_sync_buffers)
        self._reducer.ranks = None

    def _copy_state(self, root: int, *, buffers: bool) -> None:
        named = [(name, p) for name, p in self.module.named_parameters() if name not in self.parameters_to_ignore]
        own = {name for name, _ in self._shareable()} if self._shared is not None else set[str]()
        tensors: list[torch.Tensor] = [parameter for name, parameter in named if name not in own]
        broadcast_tensors(self._comm, [*tensors, *(self._buffers_kept_equal() if buffers else ())], root=root)
        if self._shared is not None:
            self._shared.check()
            for flat in self._shared.flats:
                self._comm.broadcast(flat, root=root)

    def _shareable(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Parameters that the ranks keep equal, of types that a communicator has memory for."""
        return [
            (name, parameter)
            for name, parameter in self.module.named_parameters()
            if name not in self.parameters_to_ignore and parameter.dtype in REDUCED_DTYPES
        ]

    def _copy_buffers(self, root: int) -> None:
        buffers = self._buffers_kept_equal()
        # Forward passes before this one may have kept them for their backward pass; they are statistics there.
        preserved: Any = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]  # noqa: SLF001
        with preserved(tuple(buffers)):
            broadcast_tensors(self._comm, buffers, root=root)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and buffers that the ranks share."""
        named = chain[tuple[str, torch.Tensor]](self.module.named_parameters(), self.module.named_buffers())
        return ((name, tensor) for name, tensor in named if name not in self.parameters_to_ignore)

    def _buffers_kept_equal(self) -> list[torch.Tensor]:
        return [buffer for name, buffer in self.module.named_buffers() if name not in self.parameters_to_ignore]

    def _describe(self) -> list[str]:
        parameters = {name for name, _ in self.module.named_parameters()}
        lines = [
            describe_tensor("parameter" if name in parameters else "buffer", name, tensor)
            for name, tensor in self._tensors()
        ]
        options = {
            "bucket_bytes": self._bucket_bytes,
            "forward_sync_buffers": self.forward_sync_buffers,
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": self.static_graph,
            "compression": self._compression,
            "parameters_in_shared_memory": self._shares_parameters,
        }
        return [*lines, "options " + " ".join(f"{name}={value}" for name, value in options.items())]

    def _parameter_states(self) -> list[tuple[str, int, bool, torch.dtype, torch.device]]:
        return [
            (name, id(parameter), parameter.requires_grad, parameter.dtype, parameter.device)
            for name, parameter in self.module.named_parameters()
        ]

    def _check_parameters_unchanged(self) -> None:
        now = self._parameter_states()
        if now != self._known:
            changed = sorted({name for name, *_ in {*now} ^ {*self._known}})
            raise UsageError(
                f"parameters were replaced, cast, moved, frozen or unfrozen after wrapping: {changed[:8]}; wrap again"
            )
        if self._shared is not None:
            self._shared.check()


def _run(module: torch.nn.Module, inputs: Any, kwargs: Any) -> Any:
    """A frame of its own, where `torch.compile` of the wrapper begins: it takes no frames of torch's own modules."""
    return module(*inputs, **kwargs)


def _tensors_in(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors_in(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors_in(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for each in dataclasses.fields(output):
            yield from _tensors_in(getattr(output, each.name, None))
