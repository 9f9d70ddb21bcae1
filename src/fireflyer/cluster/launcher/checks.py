"""What can be known to be wrong with a job before anything is started: one line each, naming the argument."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import sys

from fireflyer.base.errors import Exists, PermissionDenied, UsageError
from fireflyer.base.launch import RankEnvironment
from fireflyer.base.rank_layout import counts_text
from fireflyer.cluster.schema.job import MAX_NODES, MAX_RANKS, SHIPPED_NODE_CHECK, JobSpec
from fireflyer.identity.private_files import require_own_directory
from fireflyer.runtime.devices import Devices
from fireflyer.runtime.master_port import check_port
from fireflyer.runtime.processes.guarded import MARKER, child_environment

__all__ = ["EVENTS_NAME", "RANKS_PER_CORE", "check_devices", "check_host_ranks", "check_job", "command_of"]

EVENTS_NAME = "events.jsonl"
MAX_NAME_BYTES = 200
RANKS_PER_CORE = 16
"""More ranks than this on one core make no progress worth waiting for."""
_OURS = frozenset(
    {
        MARKER,
        *RankEnvironment(
            control="",
            secret_file="",
            run_dir="",
            suspension="",
            suspend_grace_ns=0,
            error_file="",
            min_nodes=0,
            max_nodes=0,
            node_ranks="1",
        ).to_mapping(),
    }
)


def check_job(spec: JobSpec, devices: Devices) -> None:
    """Raises `UsageError` or `Exists`; changes nothing."""
    _check_text(spec)
    _check_counts(spec)
    _check_command(spec)
    _check_on_failure(spec)
    _check_environment(spec)
    nodes_here = spec.nodes if not spec.hosts else 0 if spec.rendezvous is None else 1
    if nodes_here:  # hosts are asked, each for itself
        check_devices(spec, devices, nodes_here)
    check_port(spec.master_port, here=nodes_here > 0)
    _check_ports(spec)
    if os.path.lexists(spec.run_dir):
        _check_run_dir(spec.run_dir)
    if spec.stream_dir:
        _check_stream_dir(os.path.abspath(spec.stream_dir))


def _check_ports(spec: JobSpec) -> None:
    """Ports that are given one by one are of the range, too: else the firewall stops them."""
    ports = spec.ports
    named = {
        "--master-port": spec.master_port,
        "--control-port": spec.remote.port,
        "the port of --rdzv-endpoint": 0 if spec.rendezvous is None else spec.rendezvous.port,
    }
    for option, port in named.items():
        if ports is not None and port and port not in ports:
            raise UsageError(f"{option}, {port}, is not in --port-range {ports}; choose one of the range, or extend it")


def _check_run_dir(path: str) -> None:
    """Ranks write there, and the report shows what is there: another user must not be able to put it there."""
    try:
        require_own_directory(path)
    except UsageError as error:
        raise UsageError(f"run directory {error.message}; choose another one with --run-dir") from None
    except PermissionDenied as error:
        raise PermissionDenied(f"run directory {error.message}, or choose another one with --run-dir") from None
    if os.path.lexists(os.path.join(path, EVENTS_NAME)):
        raise Exists(f"run directory {path} holds another run; choose another one with --run-dir")


def _check_stream_dir(path: str) -> None:
    above = path
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    if not os.path.isdir(above):
        raise UsageError(f"--log-dir {path}: {above} is not a directory")
    if not os.access(above, os.W_OK | os.X_OK):
        raise PermissionDenied(f"--log-dir {path}: no permission to write in {above}; choose another directory")


def command_of(spec: JobSpec) -> tuple[str, ...]:
    """What each rank executes."""
    if spec.kind == "program":
        return (*spec.wrap, spec.script, *spec.args)
    module = ("-m",) if spec.kind == "module" else ()
    return (*spec.wrap, spec.python or sys.executable, "-u", *module, spec.script, *spec.args)


def _check_text(spec: JobSpec) -> None:
    for text in (spec.script, *spec.args, os.path.abspath(spec.run_dir), *(f"{n}={v}" for n, v in spec.env.items())):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{text[:200]!a} is not UTF-8; paths, arguments and variables must be") from None


def _check_counts(spec: JobSpec) -> None:
    for option, count, highest in (("--nodes", spec.nodes, MAX_NODES), ("--ranks-per-node", spec.ranks_per_node, 4096)):
        if not 1 <= count <= highest:
            raise UsageError(f"{option} {count} must be from 1 to {highest}")
    if not 0 <= spec.min_nodes <= spec.nodes:
        raise UsageError(f"--nodes {spec.min_nodes}:{spec.nodes}: the first number must not be above the second")
    if spec.elastic and not spec.hosts:
        raise UsageError(
            f"--nodes {spec.min_nodes}:{spec.nodes} needs --hosts or --rdzv-endpoint: nodes on this machine do not "
            f"come and go; use --nodes {spec.nodes}"
        )
    check_host_ranks(spec)
    if spec.world_size > MAX_RANKS:
        raise UsageError(
            f"{spec.world_size} ranks are more than the {MAX_RANKS} that one launcher can start; "
            "use fewer --nodes or --ranks-per-node"
        )
    if spec.stream_dir and len(spec.stream_files) != spec.ranks_per_node:
        raise UsageError("stream_files must have one mask for each local rank")
    if not 0 <= spec.max_restarts <= 1_000_000:
        raise UsageError(f"--max-restarts {spec.max_restarts} must be from 0 to 1000000")
    if not 0 < len(spec.name.encode(errors="replace")) <= MAX_NAME_BYTES or not spec.name.isprintable():
        raise UsageError(f"--name {spec.name[:40]!r} must have 1 to {MAX_NAME_BYTES} bytes, all printable characters")
    if spec.omp_num_threads is not None and spec.omp_num_threads < 1:
        raise UsageError(f"--omp-num-threads {spec.omp_num_threads} must be at least 1")
    for fault in spec.inject:
        limit, what = (spec.nodes, "node") if fault.kind == "kill-node" else (spec.world_size, "rank")
        if fault.target >= limit:
            raise UsageError(f"--inject {fault}: there is no {what} {fault.target}; the last one is {limit - 1}")


def check_host_ranks(spec: JobSpec) -> None:
    """Raises `UsageError` where the hosts cannot have these numbers of ranks."""
    if not spec.host_ranks:
        return
    if len(spec.host_ranks) != len(spec.hosts) or max(spec.host_ranks) != spec.ranks_per_node:
        raise UsageError("host_ranks must have one number for each host, and ranks_per_node the largest of them")
    for name, count in zip(spec.hosts, spec.host_ranks, strict=True):
        if count < 1:
            raise UsageError(f"--hosts {name}:{count}: a host must have at least 1 rank")
    if len(spec.hosts) > spec.nodes and not spec.elastic and len(set(spec.host_ranks)) > 1:
        raise UsageError(
            f"hosts with different numbers of ranks ({counts_text(spec.host_ranks)}) have no --spares: a spare takes "
            "the place of any host, and the job keeps its size; give all the same number, or --nodes MIN:MAX"
        )


def _check_command(spec: JobSpec) -> None:
    if any("\0" in text for text in (spec.script, *spec.args)):
        raise UsageError("the command holds a NUL character")
    for program, option in ((spec.python, "--python"), (spec.wrap[0] if spec.wrap else "", "--wrap")):
        if program and shutil.which(program) is None:
            raise UsageError(f"{option} {program!r} is not found or not executable; check its name and PATH")
    if spec.kind == "script":
        _check_script(spec.script)
    elif spec.kind == "program":
        if shutil.which(spec.script) is None:
            raise UsageError(f"program {spec.script!r} is not found or not executable; check its name and PATH")
    elif not spec.python and not spec.wrap:
        package = spec.script.partition(".")[0]
        if importlib.machinery.PathFinder.find_spec(package, [os.getcwd(), *sys.path]) is None:
            raise UsageError(f"module {spec.script!r} is not found; check its name, or install it into this Python")


def _check_script(path: str) -> None:
    if not os.path.exists(path):
        raise UsageError(f"script {path!r} is not found; check the path (working directory: {os.getcwd()})")
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, "__main__.py")):
        raise UsageError(f"script {path!r} is a directory; name the Python file to run")
    if not os.access(path, os.R_OK):
        raise UsageError(f"script {path!r} cannot be read; check its owner and mode")


def _check_on_failure(spec: JobSpec) -> None:
    if spec.on_failure_accuses or spec.on_failure[:1] == (SHIPPED_NODE_CHECK,):
        return  # of the site, so no fault of the job where it is missing; or ours, which each supervisor has
    if spec.on_failure and shutil.which(spec.on_failure[0]) is None:
        raise UsageError(f"--on-failure {spec.on_failure[0]!r} is not found or not executable; check its name and PATH")


def _check_environment(spec: JobSpec) -> None:
    for name, value in spec.env.items():
        if not name or "=" in name or "\0" in name + value:
            raise UsageError(f"environment variable {name!r} cannot be set; write NAME=VALUE")
        if name in _OURS:
            raise UsageError(f"environment variable {name} is set by the launcher for each rank; leave it out")
    # What every rank would refuse in every attempt is refused here, by the code that reads it there.
    told = RankEnvironment(tune=spec.tune, transport=spec.transport).to_mapping()
    every_rank = {**child_environment({}), **spec.env, **told}
    RankEnvironment.from_mapping({name: value for name, value in every_rank.items() if name.startswith("FF_")})


def check_devices(spec: JobSpec, devices: Devices, nodes: int) -> None:
    """Raises `UsageError` where a node would get more ranks than it can hold. So many nodes share this machine's
    devices."""
    kind = spec.devices if spec.devices != "auto" else ("gpu" if devices.gpus else "cpu")
    if kind == "gpu":
        if spec.ranks_on(0) > devices.gpus:
            raise UsageError(
                f"--ranks-per-node {spec.ranks_on(0)} is more than the {devices.gpus} GPUs of this machine; "
                f"use at most {devices.gpus}, or --devices cpu to run without GPUs"
                if devices.gpus
                else "--devices gpu: this machine has no GPU; use --devices cpu"
            )
        return
    limit = devices.cores * RANKS_PER_CORE
    ranks = nodes * spec.ranks_on(0)
    if ranks > limit:
        raise UsageError(
            f"{ranks} ranks are more than this machine can hold: {devices.cores} cores x {RANKS_PER_CORE} "
            f"ranks per core = {limit}; use fewer --nodes or --ranks-per-node"
        )
