"""`NodeModel`: what one node can do, in bytes and FLOPs per second.

The files in `nodes/` describe known nodes, each figure with its source; one for another node has the same keys. They
are data of the package: `load_node` reads them by name.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from fireflyer.base.decoding import decode_toml
from fireflyer.base.errors import UsageError
from fireflyer.base.shipped import ShippedFiles

__all__ = ["Buffers", "NodeModel", "Rates", "load_node", "node_names"]

Buffers = Literal["near", "interleaved", "far"]
"""Memory of the socket of a device; that of all sockets alike, page by page; that of the other sockets alone."""
MAX_SOCKETS: Final = 64
_SHIPPED: Final = ShippedFiles("fireflyer.codesign.parallel", "nodes", ".toml", "node")


class Rates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """FLOPs per second of one GPU, by the format of the factors."""

    bf16: float
    fp8: float = 0.0
    """0: the GPU has no matrix units for it."""

    def of(self, format_name: str) -> float:
        """Rate for "bf16" or "fp8"; 0 if the GPU cannot, and for "fp32", for which matrix units are not described."""
        return {"fp8": self.fp8, "bf16": self.bf16}.get(format_name, 0.0)


class NodeModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node of GPUs: memory, compute and the links between GPUs, host and network. Rates are per direction.
    `check` refuses figures that no node has."""

    name: str
    gpus: int
    gpu_memory_bytes: int
    reserved_bytes: int
    """Memory of a GPU that a plan cannot use: context, buffers of collectives, fragmentation."""
    hbm_bytes_per_s: float
    peak_flops: Rates
    """The peak that MFU refers to."""
    gemm_flops: Rates
    """Rate of a large matrix product."""
    layer_efficiency: float
    """Rate of whole layers over `gemm_flops`, at most 1."""
    nics: int
    nic_bytes_per_s: float
    """Bandwidth of one network interface, in each direction."""
    nvlink_gpus: int
    """GPUs that NVLink joins: 1 none, 2 a bridged pair."""
    nvlink_bytes_per_s: float
    """NVLink bandwidth of one GPU, all its links together, in each direction."""
    pcie_bytes_per_s: float
    """Bandwidth of the PCIe link of one GPU, in each direction."""
    bridge_gpus: int
    """GPUs behind the most loaded host bridge (root complex port)."""
    bridge_bytes_per_s: float
    """Bandwidth of that host bridge, both directions together."""
    host_memory_bytes_per_s: float
    """Bandwidth of host memory, reads and writes together."""
    allreduce: Literal["hfreduce", "ring"]
    """Algorithm that sums gradients: `hfreduce` in host memory (Fire-Flyer paper, IV), `ring` by GPUs, first inside the
    node."""
    allreduce_efficiency: float
    """Measured bandwidth of an allreduce over that of its slowest link, at most 1."""
    sms: int = 0
    """Streaming multiprocessors of a GPU; 0: not told."""
    lent_sms: int = 0
    """SMs, of `sms`, that move tokens of experts and do not compute: 20 of 132 in training of DeepSeek-V3
    (arXiv:2505.09343, 4.4). They count for plans with experts on several GPUs."""
    sockets: int = 2
    """Sockets that divide GPUs, NICs and host memory: NUMA nodes, where a socket has several."""
    between_sockets_bytes_per_s: float = 0.0
    """Bandwidth of the link between two sockets, in each direction; 0: it never limits."""
    gpu_buffers: Buffers = "near"
    """Host memory into which a GPU copies, and from which it gets a KV cache."""
    network_buffers: Buffers = "interleaved"
    """Host memory for sums, and for what the network sends and receives, seen from each NIC."""
    ordered_peer_bytes_per_s: float = 0.0
    """Bandwidth of PCIe writes of a device to another one through a socket that keeps their order: 9 GiB/s on Rome
    processors, which do not chain writes (Fire-Flyer paper, IV-D2); 0: not told, and no limit."""
    relaxed_ordering: bool = False
    """Such writes may overtake each other: then the links of PCIe alone limit them."""
    switch_gpus: int = 0
    """GPUs behind each PCIe switch below a host bridge; 0: no switches, GPUs are at host bridges."""
    switch_bytes_per_s: float = 0.0
    """Bandwidth of the uplink of one switch, in each direction. What devices behind one switch write to each other is
    not on it, and does not cross the socket."""
    switch_nics: bool = False
    """NICs are behind switches, evenly, as those of a DGX; false: at host bridges or sockets."""

    def check(self) -> None:
        """Raises `UsageError` for figures that no node has."""
        counts = ("gpus", "gpu_memory_bytes", "nics", "nvlink_gpus", "bridge_gpus")
        rates = ("hbm", "nic", "pcie", "bridge", "host_memory")
        for name in (*counts, *(f"{rate}_bytes_per_s" for rate in rates)):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be more than 0")
        for name in ("layer_efficiency", "allreduce_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be more than 0 and at most 1")
        if self.gpus % self.nvlink_gpus:
            raise UsageError(f"{self.gpus} GPUs do not divide into NVLink groups of {self.nvlink_gpus}")
        if self.nvlink_gpus > 1 and self.nvlink_bytes_per_s <= 0:
            raise UsageError(f"nvlink_bytes_per_s is {self.nvlink_bytes_per_s}, nvlink_gpus is {self.nvlink_gpus}")
        if self.gemm_flops.bf16 <= 0 or self.peak_flops.bf16 <= 0:
            raise UsageError("gemm_flops and peak_flops need bf16 more than 0")
        if self.lent_sms < 0 or self.lent_sms >= max(1, self.sms):
            raise UsageError(f"lent_sms is {self.lent_sms} of {self.sms} SMs; leave 1 or more to compute")
        if not 0 <= self.reserved_bytes < self.gpu_memory_bytes:
            raise UsageError(f"reserved_bytes is {self.reserved_bytes} of {self.gpu_memory_bytes} bytes of a GPU")
        self._check_sockets()
        self._check_switches()

    def _check_sockets(self) -> None:
        if not 1 <= self.sockets <= MAX_SOCKETS:
            raise UsageError(f"sockets is {self.sockets}; use 1 to {MAX_SOCKETS}")
        for name in ("between_sockets_bytes_per_s", "ordered_peer_bytes_per_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UsageError(f"{name} is {getattr(self, name)}; give a rate above 0, or 0 for no limit")
        for name in ("gpu_buffers", "network_buffers"):
            if getattr(self, name) == "far" and self.sockets == 1:
                raise UsageError(f'{name} is "far", and a node of 1 socket has no other memory; use "near"')

    def _check_switches(self) -> None:
        if self.switch_gpus < 0:
            raise UsageError(f"switch_gpus is {self.switch_gpus}; use 1 or more, or 0 for no switches")
        if self.switch_gpus and not 0 < self.switch_bytes_per_s < float("inf"):
            raise UsageError(f"switch_bytes_per_s is {self.switch_bytes_per_s}; give the rate of an uplink above 0")
        if not self.switch_gpus and (self.switch_bytes_per_s or self.switch_nics):
            raise UsageError("switch_bytes_per_s and switch_nics need PCIe switches; give switch_gpus")

    @property
    def nic_share(self) -> float:
        """Network bytes per second of one GPU when all send."""
        return self.nics * self.nic_bytes_per_s / self.gpus

    @property
    def peer_bytes_per_s(self) -> float | None:
        """Most bytes per second from one device to another through a socket; None: PCIe links alone limit them."""
        return None if self.relaxed_ordering else self.ordered_peer_bytes_per_s or None

    @property
    def usable_bytes(self) -> int:
        """GPU memory that a plan may use."""
        return self.gpu_memory_bytes - self.reserved_bytes


def node_names() -> tuple[str, ...]:
    """Names of the nodes that are shipped."""
    return _SHIPPED.names()


def load_node(name: str) -> NodeModel:
    """Node of that name, as `pcie-a100`. Raises `UsageError` with the names that there are."""
    return decode_toml(_SHIPPED.read(name), NodeModel)
