"""`ff health slurm validate`: validates this node, where its return waits for nothing else.

    round ──> drained by ff, idle, well, no remedy due? ──> validators ──┬─> in order, and still so: it serves
                                                                         └─> a fault: in the reason, the next remedy

Slurm starts no job on a drained node, and ends its HealthCheckProgram after a minute: so a timer of the node runs this.
Rounds of the checks go on meanwhile, and let no node serve: what they find has its remedy before the node does, and is
a fault under load, after which a validation says nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.health_event import SEVERITIES, HealthEvent
from fireflyer.base.units import SECOND
from fireflyer.cli.health.slurm_log import SlurmLog
from fireflyer.cli.health.slurm_memory import validating
from fireflyer.cli.health.slurm_node import NodeOfSlurm
from fireflyer.cluster.agent.health import validation_event
from fireflyer.cluster.agent.health_program import Printed, run_health_program
from fireflyer.cluster.schema.sync import SHIPPED_VALIDATE, VALIDATION
from fireflyer.validators.core.validation.node_models import FEWER_GPUS

__all__ = ["as_happened", "validate_node"]

_PROGRAM: Final = (SHIPPED_VALIDATE, "--time", "1m")
_LIMIT_NS: Final = 2 * 3600 * SECOND
"""Of the validators: what goes on then hangs."""
_FAULT: Final = 2


def validate_node(looking: Callable[[], NodeOfSlurm], program: tuple[str, ...], state: str, log: SlurmLog) -> int:
    """The exit code: 0, there was nothing to validate, or the node serves again; 1, it came to no result; 2, a fault.
    `looking` makes what looks at the node, from now. Raises `FireflyerError`."""
    program = program or _PROGRAM
    first = looking()
    if not first.look("validate").validate:
        return 0
    if first.drained_for is not None and _needs_peers(first.drained_for) and not _may_have_peers(program):
        log.fail(
            f"this node stays drained: {first.drained_for.cause} is seen beside its peers alone; say which, as in "
            "`ff health slurm validate -- ff validate --json --time 1m --peers FILE`"
        )
        return 1
    with validating(state) as alone:
        if not alone:
            log.say("another `ff health slurm validate` is validating this node")
            return 0
        if not looking().look("validate").validate:  # another one has ended since: the node serves, or has a remedy
            return 0
        began_ns = time.time_ns()
        log.say(f"{' '.join(program)} validates this node")
        named = {"SLURMD_NODENAME": first.name}  # as records of the peers name it
        printed = asyncio.run(run_health_program(program, _LIMIT_NS, state, environment=named))
        event = _event_of(printed, program)
        if event.could_not_run:
            log.fail(f"this node could not be validated, and stays drained: {event.words}")
            return 1
        if event.severity in ("ok", "warn"):
            log.say(f"this node was validated: {event.words}")
            return 0 if looking().look("validated", since_ns=began_ns).undrain else 1
        looking().look("check", beside=(event,))
    return _FAULT


def _needs_peers(fault: HealthEvent) -> bool:
    """A validation alone on the node cannot find it: beside others a figure is low, a result another one, GPUs
    fewer."""
    beside_peers = fault.cause.endswith("_per_s") or fault.cause in ("corruption", FEWER_GPUS)
    return fault.check == VALIDATION and beside_peers


def _may_have_peers(program: tuple[str, ...]) -> bool:
    """What another program than `ff validate` does is the site's matter."""
    is_ours = program[0] == SHIPPED_VALIDATE or "validate" in program[1:2]
    return not is_ours or any(word.partition("=")[0] == "--peers" for word in program)


def _event_of(printed: Printed, program: tuple[str, ...]) -> HealthEvent:
    """With the part and cause of a fault, by which it has a remedy, where the program says them."""
    event = validation_event(printed, program[0])
    if event.severity != "high":
        return event
    worst = max(_told(printed), key=lambda one: SEVERITIES.index(one.severity), default=event)
    return as_happened(worst if worst.severity in ("low", "high") else event)


def as_happened(fault: HealthEvent) -> HealthEvent:
    """What validators have found, as a fault for which a node is drained: no check that passes takes it back."""
    words = fault.words if fault.check == VALIDATION else f"{fault.check}: {fault.words}"
    return msgspec.structs.replace(
        fault, check=VALIDATION, words=words[:400], at_once=True, once=True, user_made=False, could_not_run=False
    )


def _told(printed: Printed) -> Iterator[HealthEvent]:
    for line in printed.lines:
        with contextlib.suppress(*DECODE_ERRORS):
            yield decode_json(line, HealthEvent)
