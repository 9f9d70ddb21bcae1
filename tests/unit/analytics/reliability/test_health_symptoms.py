"""A health event tells of the same symptom as the kernel's log, and names of checks are not taken for others."""

from __future__ import annotations

from typing import get_args

import pytest

from fireflyer.analytics.reliability.attribution import JobEvidence, Observation, diagnose
from fireflyer.analytics.reliability.health_symptoms import symptom_of_event
from fireflyer.analytics.reliability.kernel_log import finding_of
from fireflyer.analytics.reliability.taxonomy import SYMPTOM_OF_DEVICE
from fireflyer.base.health_event import HealthEvent
from fireflyer.base.kernel_faults import DeviceCause

RECORDS: dict[DeviceCause, str] = {
    "block_io": "I/O error, dev sda, sector 12",
    "file_system": "EXT4-fs error (device sda1): ext4_lookup",
    "nvme": "nvme nvme0: controller is down; will reset",
    "machine_check": "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 5",
    "machine_check_log": "mce: [Hardware Error]: Machine check events logged",
    "memory": "EDAC MC0: 1 UE memory read error on CPU_SrcID#0 (channel:0 slot:0 page:0x1f00a offset:0xc0 grain:32)",
    "pcie": "pcieport 0000:3a:00.0: AER: Uncorrected (Fatal) error received: 0000:3b:00.0",
    "adapter": "mlx5_core 0000:98:00.0: health compromised - reached miss count",
    "out_of_memory": "Out of memory: Killed process 41 (python)",
    "hung_task": "INFO: task python:41 blocked for more than 120 seconds.",
}


def event(check: str, cause: str = "", *, user_made: bool = False) -> HealthEvent:
    return HealthEvent(check=check, severity="warn", cause=cause, seen_ns=1, user_made=user_made)


@pytest.mark.parametrize("cause", get_args(DeviceCause))
def test_what_the_kernel_says_of_a_device_means_the_same_in_a_log_and_in_the_check_that_reads_it(
    cause: DeviceCause,
) -> None:
    found = finding_of(RECORDS[cause])
    assert found is not None
    assert found.cause == cause
    assert symptom_of_event(event("kernel_errors", cause)) == found.symptom == SYMPTOM_OF_DEVICE[cause]


@pytest.mark.parametrize(
    ("check", "cause", "symptom"),
    [
        ("memory_left", "available", "other"),
        ("disk_space", "space", "other"),
        ("gpu_rows", "pending", "gpu_memory"),
        ("machine_checks", "machine_checks", "main_memory"),
        ("gpu_count", "driver", "gpu_driver"),
        ("kernel_errors", "of_a_later_release", "other"),
        ("room_temperature", "warning", "other"),
        ("method_7", "amount", "other"),
        ("site_eth0", "warning", "eth_link"),
        ("site_oom", "warning", "oom"),
        ("replicas", "corruption", "corruption"),
        ("gpu_xid", "xid_48", "gpu_memory"),
    ],
)
def test_names_of_checks_are_not_taken_for_others(check: str, cause: str, symptom: str) -> None:
    assert symptom_of_event(event(check, cause)) == symptom


def test_a_program_that_ran_out_of_memory_is_not_blamed_on_the_hardware() -> None:
    told = event("kernel_errors", "out_of_memory", user_made=True)
    seen = Observation(
        after_end_s=-5, node="gpu7", symptom=symptom_of_event(told), cause=told.cause, severity="warn",
        source="health", user_made=True,
    )  # fmt: skip
    job = JobEvidence(job="1", state="FAILED", exit_code=1, signal=0, nodes=("gpu7",), observations=(seen,))
    assert diagnose(job).domains[0].domain == "user program"
