"""NVIDIA GPUs, from `nvidia-smi -q -x`: how many, memory errors, clocks, temperature and foreign processes."""

from __future__ import annotations

import functools
import re
import xml.etree.ElementTree as ElementTree
from typing import Annotated, Final
from xml.etree.ElementTree import Element

import msgspec

from fireflyer.base.health_event import Severity
from fireflyer.validators.core.checks.evidence import CannotJudge, Evidence, Finding, NotNow, Outcome, number_of
from fireflyer.validators.core.checks.placeholders import is_placeholder
from fireflyer.validators.core.checks.settings import Amount, CheckSettings, Names

__all__ = [
    "LOOKED_AGAIN",
    "GpuClockSettings",
    "GpuCountSettings",
    "GpuEccSettings",
    "GpuProcessSettings",
    "GpuRowSettings",
    "GpuTemperatureSettings",
    "gpus_of",
    "judge_gpu_clocks",
    "judge_gpu_count",
    "judge_gpu_ecc",
    "judge_gpu_processes",
    "judge_gpu_rows",
    "judge_gpu_temperature",
    "nvidia_driver_of",
    "part_of",
    "text_of",
    "uuid_of",
]

_SLOWDOWNS: Final = {
    "hw_thermal_slowdown": "thermal slowdown by the hardware",
    "hw_power_brake_slowdown": "power brake of the machine",
    "hw_slowdown": "slowdown by the hardware",
    "sw_thermal_slowdown": "thermal slowdown by the driver",
}

LOOKED_AGAIN: Final = "nvidia_smi_again"
"""Name of the output of a later look at the processes, which says nothing of the state of the GPUs: where one is at
fault only now and then, the report of the round has it."""
_STANDING: Final = (
    "nvidia-persistenced", "nvidia-cuda-mps-server", "nvidia-cuda-mps-control", "nvidia-imex", "nv-hostengine",
    "dcgm-exporter", "Xorg", "gnome-shell",
)  # fmt: skip
"""Processes that a node has on its GPUs without a task."""
_LOST: Final = re.compile(r"Unable to determine the device handle|GPU is lost")
_NO_DEVICES: Final = re.compile(r"No devices were found")
_NO_DRIVER: Final = re.compile(r"NVIDIA-SMI (?:has failed|couldn't find)|Failed to initialize NVML")


class GpuCountSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Without thresholds: the inventory says how many there are."""


class GpuEccSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    uncorrected: Amount = 0.0
    """Since the driver was loaded."""
    corrected_per_hour: Amount = 10_000.0


class GpuRowSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    uncorrected_rows: Amount = 8.0
    """Rows that were replaced after uncorrected errors, in the life of the GPU."""
    retired_pages: Amount = 10.0
    """Pages of memory that were taken out of use, of GPUs before those that replace rows."""


class GpuClockSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    least_application_mhz: Amount = 0.0
    """To which clocks of applications may be limited; 0: whatever they are."""


class GpuTemperatureSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    warn_gpu: Amount = 85.0
    low_gpu: Amount = 92.0
    warn_memory: Amount = 95.0
    low_memory: Amount = 105.0
    """Degrees Celsius."""


class GpuProcessSettings(CheckSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of an idle node only: on one that runs a task, its processes are meant to be there."""

    allowed: Names = _STANDING
    """Names of programs, without their directories and arguments."""
    used_mib: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)] = 1024
    """Of memory, without a process that holds it: a warning, as nvidia-smi does not see the processes of other
    containers, and memory of the machine may count as that of the GPU (GH200)."""
    retries: Annotated[int, msgspec.Meta(ge=0, le=10)] = 3
    """So often it is looked again, after `retry_s` each, within 10 s in all, until two looks find the same: a process
    of a task that has just ended may still end."""
    retry_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 3.0


def judge_gpu_count(evidence: Evidence, expected: int) -> Outcome:
    """A GPU that the driver has lost makes nvidia-smi print that instead of its report. `expected`: GPUs of the
    inventory; with them a driver that does not answer is a fault."""
    if expected and (silent := _silent_driver(evidence)) is not None:
        return Outcome(findings=(silent,))
    if (lost := _said_instead(evidence, _LOST)) is not None:
        finding = Finding(severity="high", cause="lost", words=lost[:300], at_once=True)
        return Outcome(findings=(finding,))
    gpus = [] if _said_instead(evidence, _NO_DEVICES) is not None else gpus_of(evidence)
    findings = [
        _finding(gpu, "high", "lost", "the driver has lost the GPU", at_once=True)
        for gpu in gpus
        if any(_LOST.match(text.strip()) for part in gpu if part.tag != "processes" for text in part.itertext())
    ]
    if findings:
        return Outcome(findings=tuple(findings))
    count = len(gpus)
    if count < expected:
        words = f"the driver has {count} GPUs; the inventory says {expected}"
        finding = Finding(severity="high", cause="missing", words=words, at_once=True)
        return Outcome(findings=(finding,))
    return Outcome(words=f"{count} GPUs") if count else Outcome(absent="no NVIDIA GPU")


def judge_gpu_ecc(evidence: Evidence, settings: GpuEccSettings) -> Outcome:
    findings: list[Finding] = []
    counters: dict[str, int] = {}
    gpus = gpus_of(evidence)
    for gpu in gpus:
        kinds = {"uncorrected": 0, "corrected": 0}
        for field in gpu.find("ecc_errors/volatile") or ():
            kinds["uncorrected" if "uncorrectable" in field.tag else "corrected"] += number_of(field.text or "") or 0
        if kinds["uncorrected"] > settings.uncorrected:
            words = f"{kinds['uncorrected']} uncorrected memory errors since the driver was loaded"
            findings.append(_finding(gpu, "high", "uncorrected", words, at_once=True))
        key = f"{part_of(gpu)}:corrected"
        counters[key] = kinds["corrected"]
        growth = evidence.growth(key, kinds["corrected"])
        if growth is not None and growth.per_hour > settings.corrected_per_hour:
            words = f"{growth.per_hour:.0f} corrected errors an hour; {settings.corrected_per_hour:g} are allowed"
            findings.append(_finding(gpu, "warn", "corrected", words))
    return Outcome(findings=tuple(findings), counters=counters, words=f"{len(gpus)} GPUs without uncorrected errors")


def judge_gpu_rows(evidence: Evidence, settings: GpuRowSettings) -> Outcome:
    """A failed remapping is of high severity (arXiv:2410.21680, II-C); a pending one is done by a reset."""
    findings = []
    gpus = gpus_of(evidence)
    for gpu in gpus:
        if text_of(gpu, "remapped_rows/remapped_row_failure") == "Yes":
            findings.append(_finding(gpu, "high", "failed", "a row of its memory could not be replaced", at_once=True))
        elif text_of(gpu, "remapped_rows/remapped_row_pending") == "Yes":
            words = "a row of its memory is replaced by the next reset of the GPU"
            findings.append(_finding(gpu, "low", "pending", words))
        rows = number_of(text_of(gpu, "remapped_rows/remapped_row_unc")) or 0
        if rows > settings.uncorrected_rows:
            words = f"{rows} rows were replaced after uncorrected errors; {settings.uncorrected_rows:g} are allowed"
            findings.append(_finding(gpu, "warn", "many", words))
        pages = sum(number_of(field.text or "") or 0 for field in gpu.iterfind("retired_pages/*/retired_count"))
        if pages > settings.retired_pages:
            words = f"{pages} pages of memory are out of use; {settings.retired_pages:g} are allowed"
            findings.append(_finding(gpu, "warn", "many_pages", words))
        if "Yes" in (text_of(gpu, f"retired_pages/{name}") for name in ("pending_retirement", "pending_blacklist")):
            words = "a page of its memory is taken out of use by the next restart of the driver"
            findings.append(_finding(gpu, "low", "pending_page", words))
    return Outcome(findings=tuple(findings), words=f"{len(gpus)} GPUs")


def judge_gpu_clocks(evidence: Evidence, settings: GpuClockSettings) -> Outcome:
    findings = []
    gpus = gpus_of(evidence)
    for gpu in gpus:
        active = {
            field.tag.split("_reason_")[-1]
            for name in ("clocks_event_reasons", "clocks_throttle_reasons")
            for field in gpu.find(name) or ()
            if field.text == "Active"
        }
        slow = [said for name, said in _SLOWDOWNS.items() if name in active]
        if slow:
            findings.append(_finding(gpu, "low" if "hw" in "".join(active) else "warn", "throttled", ", ".join(slow)))
        clock = number_of(text_of(gpu, "applications_clocks/graphics_clock"))
        if clock is not None and clock < settings.least_application_mhz:
            words = f"applications get {clock} MHz; {settings.least_application_mhz:g} are the least"
            findings.append(_finding(gpu, "low", "clock", words))
    return Outcome(findings=tuple(findings), words=f"{len(gpus)} GPUs are not slowed down")


def judge_gpu_temperature(evidence: Evidence, settings: GpuTemperatureSettings) -> Outcome:
    findings = []
    gpus = gpus_of(evidence)
    limits = (
        ("GPU", "gpu_temp", settings.warn_gpu, settings.low_gpu),
        ("memory", "memory_temp", settings.warn_memory, settings.low_memory),
    )
    hottest = 0
    for gpu in gpus:
        for what, field, warn, low in limits:
            degrees = number_of(text_of(gpu, f"temperature/{field}"))
            hottest = max(hottest, degrees or 0)
            if degrees is not None and degrees > min(warn, low):
                limit = low if degrees > low else warn
                words = f"{what} at {degrees} degrees Celsius; {limit:g} are allowed"
                findings.append(_finding(gpu, "low" if degrees > low else "warn", "temperature", words))
    return Outcome(findings=tuple(findings), words=f"{hottest} degrees Celsius at most")


def judge_gpu_processes(evidence: Evidence, settings: GpuProcessSettings) -> Outcome:
    """Of a node that is idle: else raises `NotNow`. A later look counts in place of the round's."""
    findings = []
    if (again := evidence.outputs.get(LOOKED_AGAIN)) is not None:
        evidence = msgspec.structs.replace(evidence, outputs={"nvidia_smi": again})
    gpus = gpus_of(evidence)
    if not evidence.idle:
        raise NotNow("tasks may run here, so processes may be theirs")
    for gpu in gpus:
        listed = list(gpu.iterfind("processes/process_info"))
        names = [(text_of(one, "process_name"), text_of(one, "pid")) for one in listed]
        foreign = [f"{name} ({pid})" for name, pid in names if _program(name) not in settings.allowed]
        used = number_of(text_of(gpu, "fb_memory_usage/used")) or 0
        if foreign:
            words = f"processes that do not belong to a task: {', '.join(foreign[:5])}"
            findings.append(_finding(gpu, "warn", "processes", words, user_made=True))
        elif not listed and used > settings.used_mib:
            words = f"{used} MiB are in use, and no process that nvidia-smi sees holds them"
            findings.append(_finding(gpu, "warn", "memory", words, user_made=True))
    return Outcome(findings=tuple(findings), words=f"{len(gpus)} GPUs without foreign processes")


def _program(process: str) -> str:
    """From what nvidia-smi shows of a process, as `/usr/lib/xorg/Xorg :0 -auth`."""
    return (process.split() or [""])[0].rsplit("/", 1)[-1]


def _silent_driver(evidence: Evidence) -> Finding | None:
    """A user can load a node until nvidia-smi does not end in time."""
    output = evidence.outputs.get("nvidia_smi")
    if output is None:
        return None
    words = output.problem if output.missing or output.hung else None
    if not output.problem:
        words = _said_instead(evidence, _NO_DRIVER)
    if words is None:
        return None
    said = f"the inventory has GPUs, and the driver does not answer: {words}"
    return Finding(severity="high", cause="driver", words=said[:400], user_made=output.hung)


def _said_instead(evidence: Evidence, words: re.Pattern[str]) -> str | None:
    """The line that begins with the words, before or in place of the report: that has the names of processes, which
    users choose."""
    text, _, _ = evidence.output("nvidia_smi").partition("<")
    return next((line.strip() for line in text.splitlines() if words.match(line.strip()) is not None), None)


def gpus_of(evidence: Evidence) -> list[Element]:
    """Of the report of `nvidia-smi -q -x`. Raises `CannotJudge`."""
    text = evidence.output("nvidia_smi")
    if _said_instead(evidence, _NO_DEVICES) is not None:
        raise CannotJudge("nvidia-smi finds no GPU")
    if "<!ENTITY" in text:  # the only construct of XML whose cost is not that of its length
        raise CannotJudge("nvidia-smi printed XML with entities")
    try:
        log = _parsed(text)
    except ElementTree.ParseError:
        raise CannotJudge(f"nvidia-smi printed {' '.join(text.split())[:100]!r}, which is no report") from None
    gpus = log.findall("gpu")
    if log.tag != "nvidia_smi_log" or not gpus:
        raise CannotJudge("the report of nvidia-smi has no GPU")
    return gpus


@functools.lru_cache(maxsize=1)
def _parsed(text: str) -> Element:
    """Nine checks read the report of a round: parsed for each, it would take half of the time of all. Nobody changes
    what is returned."""
    if "<!ENTITY" in text:  # which could grow without a bound
        raise CannotJudge("nvidia-smi printed a report with entities, which is none of its own")
    return ElementTree.fromstring(text.strip())  # noqa: S314 - bounded in size, without entities


def nvidia_driver_of(evidence: Evidence) -> str:
    """Version of the driver; empty where the report has none. Raises `CannotJudge`."""
    gpus_of(evidence)
    found = re.search(r"<driver_version>([^<]{1,64})</driver_version>", evidence.output("nvidia_smi"))
    return found[1].strip() if found is not None else ""


def text_of(element: Element, path: str) -> str:
    return (element.findtext(path) or "").strip()


def part_of(gpu: Element) -> str:
    """Its address as the kernel writes it, with four digits for the domain: `gpu:0000:3b:00.0`."""
    domain, _, rest = (gpu.get("id") or "").lower().partition(":")
    return f"gpu:{domain[-4:]}:{rest}"[:128]


def uuid_of(gpu: Element) -> str:
    """By which the round's serial numbers know it; empty where it tells none."""
    uuid = text_of(gpu, "uuid")
    return "" if is_placeholder(uuid) else uuid[:128]


def _finding(
    gpu: Element, severity: Severity, cause: str, words: str, *, at_once: bool = False, user_made: bool = False
) -> Finding:
    return Finding(
        severity=severity, part=part_of(gpu), cause=cause, words=words, at_once=at_once, user_made=user_made,
        serial=uuid_of(gpu),
    )  # fmt: skip
