"""Builds the benchmarks' C and C++ programs into build/bench/native, and says what is missing where it cannot."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Final

__all__ = ["Missing", "open_mpi_version", "program"]

_REPOSITORY: Final = Path(__file__).parents[1]
_BUILD: Final = _REPOSITORY / "build" / "bench"
_LIBRARIES: Final = (  # each before those that it needs
    "collectives",
    "collectives_p2p",
    "collectives_transport",
    "collectives_group",
    "collectives_kernels",
    "base",
)
_FLAGS: Final = ("-O3", "-march=native", "-Wall", "-Wextra", "-pthread")


class Missing(Exception):
    """What is not there, and how to get it."""


@functools.cache
def program(suite: str, name: str) -> str:
    """The path of the program built from `bench/<suite>/native/<name>`. Raises `Missing`."""
    source = next((Path(__file__).parent / suite / "native").glob(f"{name}.c*"))
    target = _BUILD / "native" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    compiler, more = _compiler(name, source)
    _run([compiler, *_FLAGS, *more, "-o", str(target), str(source), *_libraries(source)])
    return str(target)


@functools.cache
def open_mpi_version() -> str:
    """For example "4.1.4". Raises `Missing` where there is no Open MPI."""
    if shutil.which("mpirun") is None or shutil.which("mpicc") is None:
        raise Missing("Open MPI is not installed (Debian packages openmpi-bin and libopenmpi-dev)")
    said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" not in said:
        raise Missing(f"mpirun is not Open MPI's but says {said.strip()[:60]!r}; install Debian's openmpi-bin")
    return said.split("\n", 1)[0].split()[-1]


def _compiler(name: str, source: Path) -> tuple[str, tuple[str, ...]]:
    if source.suffix == ".cpp":
        return "g++", ("-std=c++20", f"-I{_REPOSITORY / 'cpp' / 'include'}")
    if name.startswith("mpi"):
        open_mpi_version()
        return "mpicc", ("-std=gnu17",)
    return "gcc", ("-std=gnu17",)


def _libraries(source: Path) -> tuple[str, ...]:
    """Ours, for C++ programs: in the build of the extension, brought up to date."""
    if source.suffix != ".cpp":
        return ()
    build = next((path.parent for path in _REPOSITORY.glob("build/cp*/build.ninja")), None)
    if build is None:
        raise Missing("the native extension is not built here; run `make setup`")
    _run(["cmake", "--build", str(build), "-j", "2", "--target", "fireflyer_collectives"])
    return tuple(str(build / "cpp" / f"libfireflyer_{name}.a") for name in _LIBRARIES)


def _run(command: list[str]) -> None:
    environment = os.environ | {"PATH": f"{sysconfig.get_path('scripts')}:{os.environ.get('PATH', '')}"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise Missing(f"{command[0]} is not installed") from None
    if done.returncode != 0:
        raise Missing(f"{command[0]} failed: {(done.stderr or done.stdout).strip()[-1500:]}")
