"""Figures of NVIDIA GPUs from a captured report, under the names that dcgm-exporter gives them."""

from __future__ import annotations

from typing import Final, NamedTuple

from fireflyer.validators.core.checks.evidence import CannotJudge, Evidence, number_of
from fireflyer.validators.core.checks.gpu import gpus_of, part_of, text_of

__all__ = ["FIGURES", "GpuFigures", "gpu_figures"]

MAX_GPUS: Final = 64
FIGURES: Final = {
    "DCGM_FI_DEV_GPU_TEMP": ("Temperature of the GPU, in degrees Celsius", ("temperature/gpu_temp",)),
    "DCGM_FI_DEV_MEMORY_TEMP": ("Temperature of its memory, in degrees Celsius", ("temperature/memory_temp",)),
    "DCGM_FI_DEV_SM_CLOCK": ("Clock of its multiprocessors, in MHz", ("clocks/sm_clock",)),
    "DCGM_FI_DEV_POWER_USAGE": (
        "Power that it takes, in W",
        ("gpu_power_readings/power_draw", "gpu_power_readings/instant_power_draw", "power_readings/power_draw"),
    ),
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": (
        "Uncorrected memory errors since the driver was loaded",
        ("ecc_errors/volatile/dram_uncorrectable",),
    ),
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": (
        "Rows that were replaced after corrected errors",
        ("remapped_rows/remapped_row_corr",),
    ),
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": (
        "Rows that were replaced after uncorrected errors",
        ("remapped_rows/remapped_row_unc",),
    ),
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": (
        "1 if a row could not be replaced, else 0",
        ("remapped_rows/remapped_row_failure",),
    ),
}
"""What it says, and where the report has it: the first that there is."""
_WORDS: Final = {"Yes": 1, "No": 0}


class GpuFigures(NamedTuple):
    number: int
    uuid: str
    address: str
    """As the kernel writes it: `0000:3b:00.0`."""
    values: dict[str, int]
    """By names of `FIGURES`."""


def gpu_figures(evidence: Evidence) -> tuple[GpuFigures, ...]:
    """None where there is no report, or one that nobody understands."""
    try:
        gpus = gpus_of(evidence)
    except CannotJudge:
        return ()
    found = []
    for place, gpu in enumerate(gpus[:MAX_GPUS]):
        values = {}
        for name, (_, paths) in FIGURES.items():
            for path in paths:
                text = text_of(gpu, path)
                value = _WORDS.get(text, number_of(text))
                if value is not None:
                    values[name] = value
                    break
        number = number_of(text_of(gpu, "minor_number"))
        address = part_of(gpu).removeprefix("gpu:")
        found.append(GpuFigures(place if number is None else number, text_of(gpu, "uuid")[:64], address, values))
    return tuple(found)
