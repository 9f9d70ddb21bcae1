"""Tables beside `jobs` and `events`, in memory, from which reports are computed: incidents, failures with their
evidence, and preemptions that failures caused.

incidents   counts by symptom, cause and day of the first report: an incident of a node is over when it has reported
            nothing of that cause for an hour, so a fault that is reported for days is one
of_symptoms severe ones by symptom and day, whatever their cause: two Xids of one fault are one incident; `beside`:
            those of `job_time`
job_time    the time in which jobs are known to have run, from the first start to the last end; one row
used_again  attempts with the number of an earlier job, of the same source or another
sized       `jobs` with the GPUs of all, and numbers that were used again as other jobs; `parts` of nodes that they
            took, of which a node has `parts_of_node`: jobs that share a node take it once; `until_ns`: their end, or
            until when they are known to have run
failures    jobs that ended with NODE_FAIL, or FAILED or REQUEUED while a node of theirs reported something of high
            severity from 10 minutes before to 5 after (paper, III), with the most specific symptom, its cause, the node
            that reported it, and when; `lost_s`: seconds of which the work is lost
cascades    PREEMPTED jobs whose nodes an attempt took that was started because an earlier one of its job had failed:
            that job is the `instigator`, the start of the attempt `restart_ns`
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final

from fireflyer.analytics.reliability.arrow_values import array_of
from fireflyer.analytics.reliability.known_time import until_of
from fireflyer.analytics.reliability.node_lists import names_of
from fireflyer.analytics.reliability.rows import FAILED_STATES
from fireflyer.base.units import SECOND

__all__ = ["AFTER_NS", "BEFORE_NS", "DAY_NS", "LOST_AT_MOST_S", "SPECIFIC_FIRST", "prepare", "prepare_failures"]

BEFORE_NS: Final = 600 * SECOND
AFTER_NS: Final = 300 * SECOND
LOST_AT_MOST_S: Final = 1800
"""Half of the hour between checkpoints: work that a failure loses in the mean (paper, figure 8)."""
_LOST: Final = f"least((end_ns - start_ns) / {SECOND}, coalesce(unsaved_ns / {SECOND}, {LOST_AT_MOST_S}))"
"""Seconds of an attempt whose work is lost: since its last checkpoint where its source says when that was."""
MAX_PAIRS: Final = 2_000_000
"""Of preempted jobs and attempts that may have preempted them."""
DAY_NS: Final = 86_400 * SECOND
_HOUR_NS: Final = 3600 * SECOND
_GRACE_NS: Final = 300 * SECOND
"""A preempted job ends at most this long before the other starts, or a minute after."""
_MINUTE_NS: Final = 60 * SECOND
_BATCH: Final = 1 << 17
MAX_CACHED_NAMES: Final = 2_000_000
"""Of nodes of lists that are compared: some 200 MB."""

SPECIFIC_FIRST: Final = (
    "pcie", "gpu_memory", "nvlink", "gpu_unavailable", "ib_link", "block_device", "main_memory", "platform_management",
    "filesystem_mount", "gpu_driver", "eth_link", "system_service", "node_lost", "nccl_timeout", "other",
)  # fmt: skip
"""Which symptom a failure is counted under, where several were seen: a timeout says least about its cause."""


def prepare(connection: Any, *, gpus_per_node: int) -> bool:
    """Makes all of them; False where some preemptions were left out, as there are more than `MAX_PAIRS`."""
    prepare_failures(connection, gpus_per_node=gpus_per_node)
    connection.execute(
        "CREATE TABLE job_time AS SELECT min(start_ns) AS begin_ns, max(until_ns) AS end_ns FROM sized "
        "WHERE start_ns IS NOT NULL"
    )
    _count_incidents(connection, "incidents", "symptom, cause", "severity <> 'ok'")
    _count_incidents(connection, "of_symptoms", "symptom", "severity NOT IN ('ok', 'warn') AND NOT user_made")
    return _find_cascades(connection)


def _count_incidents(connection: Any, table: str, kind: str, of: str) -> None:
    """Reports of one clock hour are one in any case: summed first, few are left to be ordered."""
    connection.execute(
        f"""
        CREATE TABLE {table} AS
        WITH hours AS (
          SELECT node, {kind}, min(time_ns) AS first_ns, max(time_ns) AS last_ns
          FROM events WHERE {of} GROUP BY node, {kind}, time_ns // {_HOUR_NS}
        ), gaps AS (
          SELECT *, first_ns - lag(last_ns) OVER (PARTITION BY node, {kind} ORDER BY first_ns) AS gap_ns FROM hours
        )
        SELECT {kind}, first_ns // {DAY_NS} AS day, count(*) AS count,
               count(*) FILTER (first_ns BETWEEN begin_ns AND end_ns + {AFTER_NS}) AS beside
        FROM gaps, job_time
        WHERE gap_ns IS NULL OR gap_ns > {_HOUR_NS} GROUP BY {kind}, day
        """
    )


def _find_used_again(connection: Any) -> None:
    """Makes `used_again`: attempts that have the number of an earlier job and are none of its attempts. An attempt goes
    on with a job where it is of its source (Slurm, the platform and runs give numbers by themselves), has its user, was
    submitted with the attempt before or within a day of its end (a job that is queued again gets a new time of
    submission), and does not run beside it."""
    connection.execute(
        f"""
        CREATE TABLE used_again AS
        WITH several AS (
          SELECT job FROM jobs WHERE start_ns IS NOT NULL GROUP BY job HAVING count(*) > 1
        ), attempts AS (
          SELECT job, coalesce(source, '') AS source, "user", start_ns, coalesce(submit_ns, start_ns) AS submit_ns,
                 end_ns
          FROM jobs SEMI JOIN several USING (job) WHERE start_ns IS NOT NULL
        ), ordered AS (
          SELECT *, lag("user") OVER one AS earlier_user, lag(submit_ns) OVER one AS earlier_submit_ns,
                 lag(end_ns) OVER one AS earlier_end_ns
          FROM attempts WINDOW one AS (PARTITION BY job, source ORDER BY start_ns, submit_ns, "user")
        ), numbered AS (
          SELECT job, source, "user", start_ns, sum(CAST(coalesce(
            (earlier_user <> "user" AND '' NOT IN (earlier_user, "user")) OR start_ns < earlier_end_ns - {_MINUTE_NS}
            OR (submit_ns <> earlier_submit_ns AND submit_ns > coalesce(earlier_end_ns, submit_ns) + {DAY_NS})
            , false) AS INTEGER)) OVER (PARTITION BY job, source ORDER BY start_ns, submit_ns, "user") AS uses
          FROM ordered
        ), dated AS (
          SELECT *, min(start_ns) OVER (PARTITION BY job, source, uses) AS first_ns FROM numbered
        ), ranked AS (
          SELECT *, dense_rank() OVER (PARTITION BY job ORDER BY first_ns, source, uses) - 1 AS place FROM dated
        )
        SELECT job, source, "user", start_ns, max(place) AS uses FROM ranked WHERE place > 0
        GROUP BY job, source, "user", start_ns
        """
    )


def prepare_failures(connection: Any, *, gpus_per_node: int, since_ns: int = 0) -> None:
    """Makes `sized` and the failures that ended at `since_ns` or later."""
    _find_used_again(connection)
    ((counted,),) = connection.execute("SELECT coalesce(max(gpus), 0) > 0 FROM jobs").fetchall()
    whole = f"nodes * {gpus_per_node}"  # where accounting names no GPU of any job, it counts none
    gpus = f"coalesce(gpus, {whole})" if counted else whole
    connection.execute(
        f"""
        CREATE VIEW sized AS
        SELECT * EXCLUDE (uses) REPLACE ({gpus} AS gpus, if(uses IS NULL, job, job || '/' || (uses + 1)) AS job),
               least({whole}, {gpus}) AS parts, {gpus_per_node} AS parts_of_node, {until_of(connection)} AS until_ns
        FROM (SELECT * REPLACE (coalesce(source, '') AS source) FROM jobs)
             LEFT JOIN used_again USING (job, source, "user", start_ns)
        """
    )
    connection.execute(
        f"""
        CREATE TABLE failed AS
        SELECT row_number() OVER () AS id, job, state, nodes, start_ns, end_ns, node_list, gpus, {_LOST} AS lost_s
        FROM sized WHERE state IN {FAILED_STATES} AND start_ns IS NOT NULL AND end_ns >= {since_ns}
        """
    )
    _expand(connection, "failed")
    _attribute(connection, since_ns)


def _attribute(connection: Any, since_ns: int) -> None:
    """Of all that was reported around the end of a job the most specific, then the first, is what it failed of; what
    was reported after the end, perhaps when the node had another job, comes after what was reported before, but for
    what may be a consequence. A window is as long as a bucket, and ends in its own bucket or the next one."""
    window_ns = BEFORE_NS + AFTER_NS
    causes = SPECIFIC_FIRST.index("node_lost")
    later = f"place + if(place % 100 > {causes} OR time_ns > last_ns - {AFTER_NS}, {causes}, 0)"
    connection.execute(
        f"""
        CREATE TABLE failures AS
        WITH windows AS (
          SELECT id, coalesce(expanded.node, failed.node_list) AS node,
                 greatest(start_ns, end_ns - {BEFORE_NS}) AS first_ns, end_ns + {AFTER_NS} AS last_ns,
                 (end_ns + {AFTER_NS}) // {window_ns} AS bucket
          FROM failed LEFT JOIN expanded_failed AS expanded ON failed.node_list = expanded.node_list
        ), severe AS (
          SELECT node, time_ns, severity = 'high' AS high, unnest([time_ns // {window_ns}, time_ns // {window_ns} + 1])
                 AS bucket, coalesce(list_position({list(SPECIFIC_FIRST)}, symptom), 99) + if(high, 0, 100) AS place,
                 symptom, cause
          FROM events WHERE severity IN ('low', 'high') AND NOT user_made AND time_ns >= {since_ns - BEFORE_NS}
        ), best AS (
          SELECT id, bool_or(high) AS high,
                 min({{'place': {later}, 'time_ns': time_ns, 'node': node, 'symptom': symptom, 'cause': cause}})
                 AS found
          FROM windows JOIN severe USING (node, bucket)
          WHERE time_ns BETWEEN first_ns AND last_ns GROUP BY id
        )
        SELECT failed.*, coalesce(found.node, '') AS culprit, coalesce(found.symptom, '') AS symptom,
               coalesce(found.cause, '') AS cause, coalesce(found.time_ns, end_ns) AS seen_ns
        FROM failed LEFT JOIN best USING (id) WHERE state NOT IN ('FAILED', 'REQUEUED') OR best.high
        """
    )


def _find_cascades(connection: Any) -> bool:
    connection.execute(
        """
        CREATE TABLE restarts AS
        WITH attempts AS (
          SELECT job, start_ns, node_list, lag(start_ns) OVER (PARTITION BY job ORDER BY start_ns) AS earlier_ns
          FROM sized WHERE job IN (SELECT job FROM failures) AND start_ns IS NOT NULL
        )
        SELECT row_number() OVER () AS id, attempts.job, attempts.start_ns, attempts.node_list
        FROM attempts JOIN failures ON failures.job = attempts.job AND failures.start_ns = attempts.earlier_ns
        """
    )
    connection.execute(
        f"""
        CREATE TABLE moments AS
        SELECT *, unnest([start_ns // {_GRACE_NS} - 1, start_ns // {_GRACE_NS}, start_ns // {_GRACE_NS} + 1]) AS bucket
        FROM restarts
        """
    )
    connection.execute(
        f"""
        CREATE TABLE preempted AS
        SELECT row_number() OVER () AS id, job, end_ns, node_list, gpus, end_ns // {_GRACE_NS} AS bucket,
               {_LOST} AS lost_s
        FROM sized WHERE state = 'PREEMPTED' AND start_ns IS NOT NULL AND end_ns IS NOT NULL
          AND end_ns // {_GRACE_NS} IN (SELECT bucket FROM moments)
        """
    )
    pairs = connection.execute(
        f"""
        SELECT preempted.id, preempted.node_list, moments.node_list, moments.start_ns, moments.job
        FROM preempted JOIN moments USING (bucket)
        WHERE preempted.end_ns BETWEEN moments.start_ns - {_GRACE_NS} AND moments.start_ns + {_MINUTE_NS}
          AND preempted.job <> moments.job
        LIMIT {MAX_PAIRS + 1}
        """
    )
    found: dict[int, tuple[int, str]] = {}  # the first restart that took one of its nodes
    sets = _NodeSets()
    seen = 0
    while rows := pairs.fetchmany(_BATCH):
        seen += len(rows)
        for preempted, its_nodes, other_nodes, *restart in rows:
            earliest = found.get(preempted)
            is_first = earliest is None or tuple(restart) < earliest
            if is_first and not sets.of(its_nodes).isdisjoint(sets.of(other_nodes)):
                found[preempted] = (restart[0], restart[1])
    columns: dict[str, list[Any]] = {
        "id": list(found),
        "instigator": [job for _, job in found.values()],
        "restart_ns": [start_ns for start_ns, _ in found.values()],
    }
    _store(connection, "causes", columns, ("int64", "string", "int64"))
    connection.execute(
        "CREATE TABLE cascades AS SELECT preempted.*, instigator, restart_ns FROM preempted JOIN causes USING (id)"
    )
    return seen <= MAX_PAIRS


class _NodeSets:
    """The names of lists; those that were used last are kept, of at most `MAX_CACHED_NAMES` names together."""

    def __init__(self) -> None:
        self._sets: OrderedDict[str, frozenset[str]] = OrderedDict()
        self.names = 0

    def of(self, node_list: str) -> frozenset[str]:
        found = self._sets.get(node_list)
        if found is None:
            found = self._sets[node_list] = frozenset(names_of(node_list))
            self.names += len(found)
            while self.names > MAX_CACHED_NAMES:
                self.names -= len(self._sets.popitem(last=False)[1])
        else:
            self._sets.move_to_end(node_list)
        return found


def _expand(connection: Any, table: str) -> None:
    """Makes `expanded_TABLE` (node_list, node) of the lists in a table that name more than one node."""
    connection.execute(f"CREATE TABLE expanded_{table} (node_list VARCHAR, node VARCHAR)")
    lists = connection.cursor().execute(
        f"SELECT DISTINCT node_list FROM {table} WHERE contains(node_list, '[') OR contains(node_list, ',')"
    )
    for number, batch in enumerate(_batches(lists)):
        _store(connection, f"batch_{number}", batch, ("string", "string"))
        connection.execute(f"INSERT INTO expanded_{table} SELECT * FROM batch_{number}")
        connection.unregister(f"batch_{number}")


def _batches(lists: Any) -> Iterator[dict[str, list[Any]]]:
    batch: dict[str, list[Any]] = {"node_list": [], "node": []}
    for (node_list,) in iter(lists.fetchone, None):
        names = names_of(node_list)  # none where it cannot be read: such a job has no evidence
        batch["node_list"] += [node_list] * len(names)
        batch["node"] += names
        if len(batch["node"]) >= _BATCH:
            yield batch
            batch = {"node_list": [], "node": []}
    yield batch


def _store(connection: Any, name: str, columns: dict[str, list[Any]], types: tuple[str, ...]) -> None:
    import pyarrow

    arrays = {
        key: array_of(values, pyarrow.type_for_alias(kind))
        for (key, values), kind in zip(columns.items(), types, strict=True)
    }
    connection.register(name, pyarrow.table(arrays))
