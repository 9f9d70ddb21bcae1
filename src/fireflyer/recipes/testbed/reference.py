"""The undisturbed runs: what the losses of each task must be.

They are computed where the recipe runs, never shipped: by the launcher alone, with the same script, options and
number of ranks as the tasks, without platform and file system. `DIRECTORY/undisturbed/NAME-KEY.json` keeps the losses
of a run that was whole; KEY covers all that they depend on: the code, the releases of torch and NumPy, the features of
the processor, the corpus and the options. Its file holds a checksum, so that a damaged one is computed again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

import fireflyer
from fireflyer.analytics.accounting import account
from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import FireflyerError, JobFailed
from fireflyer.base.events import Logged, StepReport, decode_log
from fireflyer.checkpoint.core.names import MANIFEST_FILE, final_name
from fireflyer.cluster import JobSpec, run_job
from fireflyer.data.files import read_file, replace_file
from fireflyer.recipes.corpus import Corpus
from fireflyer.recipes.testbed.facts import Reference
from fireflyer.recipes.testbed.plan import ClusterPlan, TaskPlan, train_arguments
from fireflyer.runtime import run

__all__ = [
    "cache_key",
    "code_digest",
    "decode_cached",
    "encode_cached",
    "losses_of",
    "processor",
    "reference_of",
    "releases",
    "undisturbed_runs",
]

_MAX_CACHE_BYTES = 1 << 20
_SAY_S = 4.0
"""Between two lines that say how far a run is."""
_CODE = (".py", ".so")


def cache_key(
    plan: ClusterPlan, task: TaskPlan, *, code: str, releases: str, processor: Sequence[str], corpus: str
) -> str:
    """Of all that the losses of `task` depend on. `corpus`: its fingerprint. Pure."""
    parts = {
        "code": code,
        "releases": releases,
        "processor": sorted(processor),
        "corpus": corpus,
        "ranks": task.nodes,
        "arguments": train_arguments(plan, task, corpus="", checkpoints=""),
    }
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]


def code_digest(roots: Sequence[str] | None = None) -> str:
    """Of every module, by default of the package, the compiled ones too, which an editable install keeps elsewhere."""
    digest = hashlib.sha256()
    for root in roots if roots is not None else _code_directories():
        for parent, directories, names in os.walk(root):
            directories.sort()
            for name in sorted(names):
                if name.endswith(_CODE):
                    path = os.path.join(parent, name)
                    with open(path, "rb") as file:
                        content = hashlib.file_digest(file, "sha256").hexdigest()
                    digest.update(f"{os.path.relpath(path, root)} {content}\n".encode())
    return digest.hexdigest()


def _code_directories() -> list[str]:
    compiled = importlib.util.find_spec("fireflyer.native")
    extra = compiled.submodule_search_locations if compiled is not None else None
    return [os.path.dirname(fireflyer.__file__), *(extra or ())]


def releases() -> str:
    """Of the libraries that compute."""
    return " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "numpy"))


def processor() -> list[str]:
    """What numerical libraries choose their code by."""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        fields = (line.partition(":") for line in file)
        return sorted({f"{name.strip()}={value.strip()}" for name, _, value in fields if name.strip() in _PROCESSOR})


_PROCESSOR = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")


def encode_cached(losses: Mapping[int, float], shards: Mapping[str, str]) -> bytes:
    """Losses as hexadecimal floats: exact."""
    body = _Body({str(step): losses[step].hex() for step in sorted(losses)}, dict(sorted(shards.items())))
    return msgspec.json.encode(_Cached(body, _digest(body)))


def decode_cached(data: bytes, task: TaskPlan) -> Reference | None:
    """None where this is not what `encode_cached` made of an undisturbed run of `task`."""
    try:
        found = decode_json(data, _Cached)
        losses = {int(step): float.fromhex(value) for step, value in found.body.losses.items()}
    except (*DECODE_ERRORS, ValueError, OverflowError):
        return None
    whole = sorted(losses) == list(range(1, task.steps + 1)) and len(found.body.shards) == task.nodes
    if found.digest != _digest(found.body) or not whole:
        return None
    return Reference(losses=losses, shards=found.body.shards, cached=True)


class _Body(msgspec.Struct, frozen=True):
    losses: dict[str, str]
    shards: dict[str, str]


class _Cached(msgspec.Struct, frozen=True):
    body: _Body
    digest: str


def _digest(body: _Body) -> str:
    return hashlib.sha256(msgspec.json.encode(body, order="sorted")).hexdigest()


def losses_of(log: Iterable[Logged], task: TaskPlan) -> dict[int, float] | str:
    """Of an undisturbed run; one sentence that says why it proves nothing. Pure."""
    entries = list(log)
    job = account(entries)
    if job.exit_code != 0 or job.attempts != 1 or job.failures:
        return f"the undisturbed run of {task.name} did not end well in one attempt: {job.reason}"
    losses: dict[int, float] = {}
    reported: set[tuple[int, int]] = set()
    for entry in entries:
        event = entry.event
        if isinstance(event, StepReport) and event.loss is not None:
            reported.add((event.rank, event.step))
            if losses.setdefault(event.step, event.loss) != event.loss:
                return f"ranks of the undisturbed run of {task.name} have different losses at step {event.step}"
    wanted = {(rank, step) for rank in range(task.nodes) for step in range(1, task.steps + 1)}
    if reported != wanted:
        return f"ranks of the undisturbed run of {task.name} reported {len(reported)} losses, not {len(wanted)}"
    return losses


async def reference_of(
    plan: ClusterPlan,
    task: TaskPlan,
    *,
    directory: str,
    corpus: str,
    key: str,
    on_entry: Callable[[Logged], None] = lambda _: None,
) -> Reference:
    """From the cache, or computed. `directory`: of all undisturbed runs; `corpus`: a local directory. Raises
    `JobFailed`, `FireflyerError`."""
    path = os.path.join(directory, f"{task.name}-{key}.json")
    cached = _read(path, task)
    if cached is not None:
        return cached
    run_dir = os.path.join(directory, task.name)
    checkpoints = os.path.join(run_dir, "checkpoints")
    shutil.rmtree(run_dir, ignore_errors=True)
    result = await run_job(
        JobSpec(
            script="fireflyer.recipes.train_gpt",
            kind="module",
            args=train_arguments(plan, task, corpus=corpus, checkpoints=checkpoints),
            run_dir=run_dir,
            nodes=task.nodes,
            ranks_per_node=1,
            name=task.name,
            devices="cpu",
        ),
        on_entry=on_entry,
    )
    losses = losses_of(_log_at(result.events_path), task)
    if isinstance(losses, str):
        raise JobFailed(f"{losses}; its logs are in {result.logs_dir}")
    shards = _shards_in(os.path.join(checkpoints, final_name(task.steps, [])))
    _remove_older(directory, task.name)
    replace_file(path, encode_cached(losses, shards))
    return Reference(losses=losses, shards=shards, cached=False)


def _shards_in(checkpoint: str) -> dict[str, str]:
    """Digests of its files but the manifest, which names the save."""
    found = {}
    for name in sorted(os.listdir(checkpoint)):
        if name != MANIFEST_FILE:
            with open(os.path.join(checkpoint, name), "rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _read(path: str, task: TaskPlan) -> Reference | None:
    try:
        return decode_cached(read_file(path, max_bytes=_MAX_CACHE_BYTES), task)
    except FireflyerError:
        return None


def _log_at(path: str) -> list[Logged]:
    with open(path, "rb") as file:
        return decode_log(file, name=path)


def _remove_older(directory: str, name: str) -> None:
    for other in os.listdir(directory):
        if other.startswith(f"{name}-") and other.endswith(".json"):
            os.unlink(os.path.join(directory, other))


def undisturbed_runs(
    plan: ClusterPlan, tasks: Sequence[TaskPlan], directory: str, corpus: Corpus, say: Callable[[str], None]
) -> dict[str, Reference]:
    """Of `tasks`, by name; kept in `directory`/undisturbed. `corpus`: the one in `directory`/corpus. `say` gets lines
    of progress. Raises `JobFailed`, `FireflyerError`."""
    place = os.path.join(directory, "undisturbed")
    os.makedirs(place, exist_ok=True)
    code, features = code_digest(), processor()
    found = {}
    for task in tasks:
        key = cache_key(plan, task, code=code, releases=releases(), processor=features, corpus=corpus.fingerprint)
        say(f"undisturbed run of {task.name}: {task.nodes} ranks, {task.steps} steps")
        work = reference_of(
            plan, task, directory=place, corpus=os.path.join(directory, "corpus"), key=key,
            on_entry=_saying(task, say),
        )  # fmt: skip
        found[task.name] = run(work)
        if found[task.name].cached:
            say(f"undisturbed run of {task.name}: computed earlier, with the same code on the same kind of processor")
    return found


def _saying(task: TaskPlan, say: Callable[[str], None]) -> Callable[[Logged], None]:
    said_s = time.monotonic()

    def take(entry: Logged) -> None:
        nonlocal said_s
        event = entry.event
        if isinstance(event, StepReport) and event.rank == 0 and time.monotonic() - said_s >= _SAY_S:
            said_s = time.monotonic()
            say(f"undisturbed run of {task.name}: step {event.step} of {task.steps}")

    return take
