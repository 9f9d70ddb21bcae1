"""What can be known to be wrong with a job before anything is started: one line each, naming the argument."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import sys

from fireflyer.base.errors import Exists, PermissionDenied, UsageError
from fireflyer.base.launch import RankEnvironment
from fireflyer.cluster.launcher.devices import Devices, check_devices
from fireflyer.cluster.launcher.master_port import check_port
from fireflyer.cluster.schema.job import MAX_NODES, MAX_RANKS, JobSpec
from fireflyer.identity.private_files import require_own_directory
from fireflyer.runtime.processes.guarded import MARKER, child_environment

__all__ = ["EVENTS_NAME", "check_job", "command_of"]

EVENTS_NAME = "events.jsonl"
MAX_NAME_BYTES = 200
_OURS = frozenset({MARKER, *RankEnvironment(control="", secret_file="", run_dir="").to_mapping()})


def check_job(spec: JobSpec, devices: Devices) -> None:
    """Raises `UsageError` or `Exists`; changes nothing."""
    _check_text(spec)
    _check_counts(spec)
    _check_command(spec)
    _check_environment(spec)
    check_devices(spec, devices)
    check_port(spec.master_port)
    if os.path.lexists(spec.run_dir):
        _check_run_dir(spec.run_dir)


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


def command_of(spec: JobSpec) -> tuple[str, ...]:
    """What each rank executes."""
    if spec.kind == "program":
        return (spec.script, *spec.args)
    module = ("-m",) if spec.kind == "module" else ()
    return (sys.executable, "-u", *module, spec.script, *spec.args)


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
    if spec.world_size > MAX_RANKS:
        raise UsageError(
            f"{spec.world_size} ranks are more than the {MAX_RANKS} that one launcher can start; "
            "use fewer --nodes or --ranks-per-node"
        )
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


def _check_command(spec: JobSpec) -> None:
    if any("\0" in text for text in (spec.script, *spec.args)):
        raise UsageError("the command holds a NUL character")
    if spec.kind == "script":
        _check_script(spec.script)
    elif spec.kind == "program":
        if shutil.which(spec.script) is None:
            raise UsageError(f"program {spec.script!r} is not found or not executable; check its name and PATH")
    else:
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
