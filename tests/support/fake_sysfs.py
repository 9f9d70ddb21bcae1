"""Writes sysfs trees of machines that are not here, for any `Disk`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fireflyer.base.ports import Disk

__all__ = ["as_list", "cpu_files", "node_files", "status_files", "tree_of_epyc", "tree_of_nodes", "write_tree"]

Tree = dict[str, str]


def write_tree(disk: Disk, root: str, files: Mapping[str, str]) -> None:
    made = {root}
    for path, content in files.items():
        parts = path.split("/")
        for depth in range(1, len(parts)):
            directory = "/".join([root, *parts[:depth]])
            if directory not in made:
                made.add(directory)
                if not disk.exists(directory):
                    disk.mkdir(directory)
        file = disk.create(f"{root}/{path}")
        file.pwrite(content.encode(), 0)
        file.close()


def as_list(cpus: Iterable[int]) -> str:
    """`0-3,8`, as the kernel writes it."""
    ordered = sorted(cpus)
    ranges: list[list[int]] = []
    for cpu in ordered:
        if ranges and ranges[-1][1] == cpu - 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ranges) + "\n"


def cpu_files(cpu: int, *, core: Sequence[int], l3: Sequence[int], package: Sequence[int]) -> Tree:
    base = f"sys/devices/system/cpu/cpu{cpu}"
    levels = {0: ("1\n", core), 1: ("1\n", core), 2: ("2\n", core), 3: ("3\n", l3)}
    files = {
        f"{base}/topology/core_cpus_list": as_list(core),
        f"{base}/topology/package_cpus_list": as_list(package),
    }
    for index, (level, shared) in levels.items():
        files[f"{base}/cache/index{index}/level"] = level
        files[f"{base}/cache/index{index}/shared_cpu_list"] = as_list(shared)
    return files


def node_files(node: int, *, cpus: Sequence[int], memory_kib: int, distances: Sequence[int]) -> Tree:
    base = f"sys/devices/system/node/node{node}"
    return {
        f"{base}/cpulist": as_list(cpus),
        f"{base}/meminfo": f"Node {node} MemTotal:       {memory_kib} kB\nNode {node} MemFree:        1000 kB\n",
        f"{base}/distance": " ".join(map(str, distances)) + "\n",
    }


def status_files(cpus: Iterable[int], nodes: Iterable[int]) -> Tree:
    return {
        "proc/self/status": f"Name:\tpython\nCpus_allowed_list:\t{as_list(cpus)}Mems_allowed_list:\t{as_list(nodes)}"
    }


def tree_of_epyc() -> Tree:
    """Two sockets of 32 cores with two threads each (sibling = core + 64), 8 caches of 4 cores in each socket; eight
    GPUs, four near each socket, and an InfiniBand card near the second."""
    files: Tree = {"sys/devices/system/cpu/online": "0-127\n", "sys/devices/system/node/online": "0-1\n"}
    for socket in (0, 1):
        cores = range(32 * socket, 32 * socket + 32)
        package = [*cores, *(core + 64 for core in cores)]
        files |= node_files(socket, cpus=package, memory_kib=256 << 20, distances=[10, 32] if socket == 0 else [32, 10])
        for core in cores:
            group = range(core // 4 * 4, core // 4 * 4 + 4)
            l3 = [*group, *(other + 64 for other in group)]
            for cpu in (core, core + 64):
                files |= cpu_files(cpu, core=[core, core + 64], l3=l3, package=package)
    for gpu in range(8):
        base = f"sys/bus/pci/devices/0000:{16 * gpu + 1:02x}:00.0"
        files |= {
            f"{base}/class": "0x030200\n",
            f"{base}/vendor": "0x10de\n",
            f"{base}/numa_node": f"{gpu // 4}\n",
            f"{base}/current_link_speed": "2.5 GT/s PCIe\n",
            f"{base}/current_link_width": "16\n",
            f"{base}/max_link_speed": "16.0 GT/s PCIe\n",
            f"{base}/max_link_width": "16\n",
        }
    nic = "sys/bus/pci/devices/0000:a1:00.0"
    files |= {
        f"{nic}/class": "0x020700\n",
        f"{nic}/vendor": "0x15b3\n",
        f"{nic}/numa_node": "1\n",
        f"{nic}/current_link_speed": "16.0 GT/s PCIe\n",
        f"{nic}/current_link_width": "16\n",
        f"{nic}/infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)\n",
        f"{nic}/net/ib0/speed": "200000\n",
    }
    console = "sys/bus/pci/devices/0000:c3:00.0"
    files |= {f"{console}/class": "0x030000\n", f"{console}/vendor": "0x1a03\n"}
    return files | status_files(range(128), (0, 1))


def tree_of_nodes(
    nodes: Sequence[Sequence[int]], *, allowed: Iterable[int], mems: Iterable[int] | None = None, smt: bool = False
) -> Tree:
    """A socket for each NUMA node with the processors listed, a last-level cache for all of them; with `smt`
    neighbouring processors share a core."""
    cpus = sorted(cpu for node in nodes for cpu in node)
    files: Tree = {
        "sys/devices/system/cpu/online": as_list(cpus),
        "sys/devices/system/node/online": as_list(range(len(nodes))),
    }
    for number, members in enumerate(nodes):
        distances = [10 if other == number else 20 for other in range(len(nodes))]
        files |= node_files(number, cpus=members, memory_kib=1 << 20, distances=distances)
        for cpu in members:
            core = [cpu & ~1, cpu | 1] if smt else [cpu]
            files |= cpu_files(cpu, core=core, l3=members, package=members)
    return files | status_files(allowed, range(len(nodes)) if mems is None else mems)
