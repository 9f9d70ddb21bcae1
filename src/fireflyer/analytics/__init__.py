"""Analysis of a job from its event log alone: the account of its time, ETTR, and the report."""

from fireflyer.analytics.accounting import (
    Block,
    Checkpoint,
    Failure,
    JobAccount,
    LossPoint,
    Parts,
    account,
)
from fireflyer.analytics.ettr import (
    Ettr,
    EttrInputs,
    daly_young_interval_s,
    ettr,
    expected_ettr,
    expected_ettr_long_run,
    failure_rate_per_s,
    measured_ettr,
    mttf_s,
    renewal_ettr,
)

__all__ = [
    "Block",
    "Checkpoint",
    "Ettr",
    "EttrInputs",
    "Failure",
    "JobAccount",
    "LossPoint",
    "Parts",
    "account",
    "daly_young_interval_s",
    "ettr",
    "expected_ettr",
    "expected_ettr_long_run",
    "failure_rate_per_s",
    "measured_ettr",
    "mttf_s",
    "renewal_ettr",
]
