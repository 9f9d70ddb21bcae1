"""What an agent says of its node: GPUs and network, from a library and files that a test makes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import pytest

from fireflyer.base.units import GIB
from fireflyer.cluster.agent import inventory
from fireflyer.cluster.agent.inventory import gpus_of, inventory_of, network_of
from fireflyer.cluster.agent.records import Membership
from fireflyer.cluster.schema.sync import Gpu, Inventory

ADDRESSES: Final = [("lo", "127.0.0.1"), ("eth0", "10.0.0.1"), ("eth0", "fd00::1"), ("ib0", "10.1.0.1")]


class NVMLError(Exception):
    pass


class Nvml:
    """The names of nvidia-ml-py. `gpus`: name and bytes of memory of each; an error where it is raised instead."""

    NVMLError = NVMLError

    def __init__(self, *gpus: tuple[Any, Any], fails: bool = False, count_fails: bool = False) -> None:
        self._gpus = gpus
        self._fails, self._count_fails = fails, count_fails
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if self._fails:
            raise NVMLError("driver not loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        if self._count_fails:
            raise NVMLError("unknown")
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> tuple[Any, Any]:  # noqa: N802
        return self._gpus[number]

    def nvmlDeviceGetName(self, device: tuple[Any, Any]) -> Any:  # noqa: N802
        return _or_raise(device[0])

    def nvmlDeviceGetMemoryInfo(self, device: tuple[Any, Any]) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=_or_raise(device[1]), free=1, used=2)


def _or_raise(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


def write(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def driver(root: Path, *models: str) -> str:
    """As NVIDIA's driver writes it."""
    text = "Model: \t\t %s\nIRQ:   \t\t 42\nGPU UUID: \t GPU-0\nBus Type: \t PCIe\n"
    files = {f"proc/driver/nvidia/gpus/0000:0{at}:00.0/information": text % one for at, one in enumerate(models)}
    return write(root, files)


def test_gpus_are_those_of_nvml_with_their_memory(tmp_path: Path) -> None:
    nvml = Nvml(("NVIDIA A100", 80 * GIB), (b"NVIDIA A100", 40 * GIB))
    root = driver(tmp_path, "another one")
    assert gpus_of(root, nvml) == (Gpu("NVIDIA A100", 80 * GIB), Gpu("NVIDIA A100", 40 * GIB))
    assert nvml.open == 0


def test_a_gpu_that_is_lost_hides_no_other_and_one_without_memory_of_its_own_has_none() -> None:
    nvml = Nvml((NVMLError("GPU is lost"), 1), ("GB10", NVMLError("not supported")), ("H100", GIB))
    assert gpus_of("/nowhere", nvml) == (Gpu("GB10", 0), Gpu("H100", GIB))
    assert nvml.open == 0


@pytest.mark.parametrize("nvml", [None, Nvml(fails=True), Nvml(("x", 1), count_fails=True), Nvml()])
def test_where_nvml_says_nothing_the_drivers_files_do(tmp_path: Path, nvml: Nvml | None) -> None:
    root = driver(tmp_path, "NVIDIA A100-PCIE-40GB", "")
    assert gpus_of(root, nvml) == (Gpu("NVIDIA A100-PCIE-40GB", 0), Gpu("NVIDIA GPU", 0))
    assert gpus_of(str(tmp_path / "none"), nvml) == ()
    assert nvml is None or nvml.open == 0


def test_more_gpus_and_ports_than_an_inventory_holds_are_cut_not_refused(tmp_path: Path) -> None:
    gpus = gpus_of("/nowhere", Nvml(*[("x" * 2000, 1)] * 100))
    interfaces = network_of("/nowhere", [(f"eth{number}", "10.0.0.1") for number in range(100)])
    assert (len(gpus), len(gpus[0].name), len(interfaces)) == (64, 1000, 64)


def test_interfaces_have_addresses_and_the_speed_that_the_kernel_knows(tmp_path: Path) -> None:
    root = write(tmp_path, {"sys/class/net/eth0/speed": "100000\n", "sys/class/net/ib0/speed": "-1\n"})
    assert network_of(root, ADDRESSES) == ("eth0 10.0.0.1 100 Gb/s", "eth0 fd00::1 100 Gb/s", "ib0 10.1.0.1")
    write(tmp_path, {"sys/class/net/ib0/speed": "100\n", "sys/class/net/eth0/speed": "2500\n"})
    assert network_of(root, ADDRESSES[2:]) == ("eth0 fd00::1 2.5 Gb/s", "ib0 10.1.0.1 100 Mb/s")


def test_rdma_ports_that_are_up_are_listed_with_or_without_an_address(tmp_path: Path) -> None:
    def port(device: str, number: int, state: str, layer: str, rate: str) -> dict[str, str]:
        folder = f"sys/class/infiniband/{device}/ports/{number}"
        return {f"{folder}/state": state, f"{folder}/link_layer": f"{layer}\n", f"{folder}/rate": f"{rate}\n"}

    files = port("mlx5_0", 1, "4: ACTIVE\n", "InfiniBand", "200 Gb/sec (4X HDR)")
    files |= port("mlx5_1", 1, "1: DOWN\n", "InfiniBand", "10 Gb/sec (4X SDR)")
    files |= port("mlx5_1", 2, "2: INIT\n", "InfiniBand", "200 Gb/sec (4X HDR)")
    files |= port("mlx5_2", 1, "4: ACTIVE\n", "Ethernet", "100 Gb/sec (4X EDR)")
    assert network_of(write(tmp_path, files), []) == (
        "mlx5_0 port 1 InfiniBand 200 Gb/sec (4X HDR)",
        "mlx5_2 port 1 Ethernet 100 Gb/sec (4X EDR)",
    )


def test_the_inventory_of_this_machine_is_one_that_managers_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "_nvml", lambda: Nvml(("NVIDIA H100", 80 * GIB)))
    found = inventory_of(Membership(machine="m", issuer="head:1", address="10.0.0.1", port=7000, credential="c"))
    assert found.gpus == (Gpu("NVIDIA H100", 80 * GIB),)
    assert (found.address, found.port) == ("10.0.0.1", 7000)
    assert found.cores >= 1
    assert found.memory_bytes > GIB // 4
    assert not any(one.startswith("lo ") for one in found.interfaces)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Inventory) == found
