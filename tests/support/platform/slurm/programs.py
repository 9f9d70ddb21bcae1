"""The commands of a simulated Slurm: they are given the arguments that the product gives, and print what it reads.

Each is carried out at an instant, or never, or when nobody waits for it any more; its answer comes, or is lost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from tests.support.platform.slurm.controller import OURS, Controller, Job, Refusal
from tests.support.platform.slurm.coroutines import Later

from fireflyer.base.errors import PermanentError, Timeout, Unreachable
from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.manager.slurm.commands import SlurmCommands

__all__ = ["TIMEOUT_NS", "SimCommands"]

TIMEOUT_NS = 4 * SECOND
LATE_NS = 2 * SECOND
"""After it was given up, a command may still be carried out for so long."""


class SimCommands(SlurmCommands):
    """Of one process of a manager."""

    def __init__(self, controller: Controller, manager: str, cut: Callable[[str, str], bool]) -> None:
        super().__init__("", TIMEOUT_NS)
        self._controller, self._manager, self._cut = controller, manager, cut

    async def _run(self, command: Sequence[str], given: str = "") -> str:
        controller, world = self._controller, self._controller.world
        later: Later[str] = Later(world)
        controller.asked[command[0]] = None
        rng, probabilities = controller.rng, controller.probabilities
        away = self._cut(self._manager, "slurmctld") or self._cut("slurmctld", self._manager)
        slow_ns = rng.randrange(3 * SECOND) if controller.happens(probabilities.slow) else 0
        begin_ns = rng.randrange(50 * MS) + (slow_ns if rng.random() < 0.5 else 0)
        end_ns = begin_ns + rng.randrange(50 * MS) + slow_ns
        lost = away or controller.happens(probabilities.lost)
        carried_out = not away and not (lost and rng.random() < 0.5)
        if command[0] == "sbatch" and not away and controller.happens(probabilities.late):
            lost, begin_ns = True, TIMEOUT_NS + rng.randrange(LATE_NS)

        def begin() -> None:
            try:
                text = self._answer(command, given)
            except Refusal as refusal:
                answer(PermanentError(f"{command[0]}: {refusal}"))
            except Unreachable as error:
                answer(error)
            else:
                answer(text)

        def answer(said: str | PermanentError | Unreachable) -> None:
            if lost:
                return
            delay_ns = max(0, end_ns - begin_ns)
            world.call_after(delay_ns, lambda: later.give(said) if isinstance(said, str) else later.fail(said))

        if carried_out:
            world.call_after(begin_ns, begin)
        world.call_after(TIMEOUT_NS, lambda: later.fail(Timeout(f"{command[0]} did not end within 4 s")))
        return await later

    def _answer(self, command: Sequence[str], given: str) -> str:
        controller, options = self._controller, _options(command)
        if command[0] == "sacct":
            return self._sacct(options)
        if not controller.up:
            raise Unreachable(f"{command[0]}: slurm_load error: Unable to contact slurm controller (connect failure)")
        match command[0]:
            case "squeue":
                return self._squeue(options)
            case "sinfo":
                views = controller.views.items()
                return "".join(f"{name}|{controller.state_of(name)}|{view.reason or 'none'}\n" for name, view in views)
            case "sbatch":
                return self._sbatch(options, given)
            case "scancel":
                self._scancel(int(command[-1]), options["name"])
                return ""
            case _:
                return self._scontrol(command)

    def _named(self, options: dict[str, str]) -> list[Job]:
        names = options["name"].split(",")
        return [job for job in self._controller.jobs.values() if job.name in names]

    def _squeue(self, options: dict[str, str]) -> str:
        jobs = self._named(options)
        if "Format" in options:
            running = [job for job in jobs if job.shown == "RUNNING"]
            return "".join(f"{job.id:<12}{_time(job.preempt_s):<24}\n" for job in running)
        return "".join(
            f"{job.id}|{job.shown}|{job.uid}|{job.least}|{_time(job.start_s)}|{_time(job.end_s)}|{job.submit_s}"
            f"|{','.join(job.nodes)}|{job.name}|{'Resources' if job.state == 'PENDING' else 'None'}\n"
            for job in jobs
        )

    def _sbatch(self, options: dict[str, str], given: str) -> str:
        controller = self._controller
        if controller.happens(controller.probabilities.refused):
            raise Refusal("error: Batch job submission failed: Job violates accounting/QOS policy")
        assert options["dependency"] == "singleton"
        name = options["job-name"]
        others = [job for job in controller.jobs.values() if (job.name, job.uid) == (name, OURS) and job.lives]
        assert not others, f"{name} is submitted while job {others[0].id} of it lives"
        least, _, most = options["nodes"].partition("-")
        exclude = tuple(options.get("exclude", "").split(","))
        number = controller.submit(
            name=name, uid=OURS, least=int(least), most=int(most or least), exclude=exclude, script=given
        )
        return f"{number}\n"

    def _scancel(self, number: int, name: str) -> None:
        job = self._controller.jobs.get(number)
        assert job is None or job.uid == OURS or job.name != name, f"job {number} of another user is cancelled"
        self._controller.cancel(number, name, OURS)

    def _scontrol(self, command: Sequence[str]) -> str:
        controller = self._controller
        if command[1] == "update":
            fields = dict(word.split("=", 1) for word in command[2:])
            if fields["State"] == "DRAIN":
                controller.drain(fields["NodeName"], fields["Reason"])
            else:
                controller.resume(fields["NodeName"])
            return ""
        job = controller.jobs.get(int(command[-1]))
        if job is None:
            raise Refusal("slurm_load_jobs error: Invalid job id specified")
        return (
            f"JobId={job.id} JobName={job.name} UserId=user({job.uid}) GroupId=user({job.uid}) JobState={job.shown}"
            f" ExitCode={job.code}:0 SubmitTime={job.submit_s} StartTime={_time(job.start_s)}"
            f" EndTime={_time(job.end_s)} PreemptTime={_time(job.preempt_s)} Partition=test"
            f" NodeList={','.join(job.nodes) or '(null)'} BatchHost=x Command=(null)\n"
        )

    def _sacct(self, options: dict[str, str]) -> str:
        controller = self._controller
        if controller.happens(controller.probabilities.sacct_fails):
            raise Unreachable("sacct: error: slurm_persist_conn_open: Connection refused")
        names, since_s = options["name"].split(","), int(options["starttime"].removeprefix("uts"))
        return "".join(
            f"{job.id}|{_state(job)}|{job.uid}|{job.submit_s}|{_time(job.start_s)}|{_time(job.end_s)}|{job.code}:0"
            f"|{','.join(job.nodes) or 'None assigned'}|{job.name}\n"
            for due_ns, job in controller.records
            if due_ns <= controller.world.now_ns and job.name in names and job.submit_s >= since_s
        )


def _state(job: Job) -> str:
    return f"CANCELLED by {job.cancelled_by}" if job.cancelled_by is not None else job.state


def _time(at_s: int | None) -> str:
    return "Unknown" if at_s is None else str(at_s)


def _options(command: Sequence[str]) -> dict[str, str]:
    found = (re.fullmatch(r"--([a-zA-Z-]+)(?:=(.*))?", word, re.DOTALL) for word in command)
    return {match[1]: match[2] or "" for match in found if match is not None}
