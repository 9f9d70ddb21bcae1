"""Tables beside `jobs` and `events`, in memory, from which reports are computed: incidents, failures with their
evidence, and preemptions that failures caused.

incidents   what a node reported of one cause within an hour counts once
failures    jobs that ended with NODE_FAIL, or FAILED or REQUEUED while a node of theirs reported something of high
            severity from 10 minutes before to 5 after (paper, III), with the most specific symptom and the node that
            reported it
cascades    PREEMPTED jobs whose nodes an attempt took that was started because an earlier attempt of its job had failed
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final

from fireflyer.analytics.reliability.node_lists import expand_node_list
from fireflyer.analytics.reliability.rows import FAILED_STATES
from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND

__all__ = ["AFTER_NS", "BEFORE_NS", "LOST_AT_MOST_S", "SPECIFIC_FIRST", "prepare"]

BEFORE_NS: Final = 600 * SECOND
AFTER_NS: Final = 300 * SECOND
LOST_AT_MOST_S: Final = 1800
"""Half of the hour between checkpoints: work that a failure loses in the mean (paper, figure 8)."""
MAX_PAIRS: Final = 2_000_000
"""Of preempted jobs and attempts that may have preempted them."""
_HOUR_NS: Final = 3600 * SECOND
_GRACE_NS: Final = 300 * SECOND
"""A preempted job ends at most this long before the other starts, or a minute after."""
_MINUTE_NS: Final = 60 * SECOND
_BATCH: Final = 1 << 17

SPECIFIC_FIRST: Final = (
    "pcie", "gpu_memory", "nvlink", "gpu_unavailable", "ib_link", "block_device", "main_memory", "platform_management",
    "filesystem_mount", "gpu_driver", "eth_link", "system_service", "node_lost", "nccl_timeout", "other",
)  # fmt: skip
"""Which symptom a failure is counted under, where several were seen: a timeout says least about its cause."""


def prepare(connection: Any, *, gpus_per_node: int) -> bool:
    """Makes the tables; False where some preemptions were left out, as there are more than `MAX_PAIRS`."""
    connection.execute(
        f"""
        CREATE TABLE incidents AS
        SELECT node, symptom, cause, user_made, min(time_ns) AS time_ns, count(*) AS reports,
               bool_or(severity IN ('low', 'high')) AS severe, bool_or(severity = 'high') AS high
        FROM events WHERE severity <> 'ok'
        GROUP BY node, symptom, cause, user_made, time_ns // {_HOUR_NS}
        """
    )
    connection.execute(
        f"""
        CREATE TABLE failed AS
        SELECT row_number() OVER () AS id, job, user, state, nodes, start_ns, end_ns, node_list,
               if(gpus > 0, gpus, nodes * {gpus_per_node}) AS gpus
        FROM jobs WHERE state IN {FAILED_STATES} AND start_ns IS NOT NULL AND end_ns IS NOT NULL
        """
    )
    _expand(connection, "failed")
    _attribute(connection)
    return _find_cascades(connection, gpus_per_node)


def _attribute(connection: Any) -> None:
    bucket = BEFORE_NS + AFTER_NS
    connection.execute(
        f"""
        CREATE TABLE evidence AS
        WITH windows AS (
          SELECT id, coalesce(expanded.node, failed.node_list) AS node,
                 greatest(start_ns, end_ns - {BEFORE_NS}) AS first_ns, end_ns + {AFTER_NS} AS last_ns
          FROM failed LEFT JOIN expanded_failed AS expanded ON failed.node_list = expanded.node_list
        ), halves AS (
          SELECT id, node, first_ns, last_ns,
                 unnest(list_distinct([first_ns // {bucket}, last_ns // {bucket}])) AS bucket
          FROM windows
        ), severe AS (
          SELECT node, symptom, cause, time_ns, severity = 'high' AS high, time_ns // {bucket} AS bucket
          FROM events WHERE severity IN ('low', 'high') AND NOT user_made
        )
        SELECT id, node, symptom, cause, bool_or(high) AS high, min(time_ns) AS time_ns
        FROM halves JOIN severe USING (node, bucket)
        WHERE time_ns BETWEEN first_ns AND last_ns
        GROUP BY id, node, symptom, cause
        """
    )
    connection.execute(
        f"""
        CREATE TABLE failures AS
        WITH ranked AS (
          SELECT *, coalesce(list_position({list(SPECIFIC_FIRST)}, symptom), 99) + if(high, 0, 100) AS place FROM
          evidence
        ), best AS (
          SELECT id, bool_or(high) AS high, arg_min(node, place) AS culprit, arg_min(symptom, place) AS symptom
          FROM ranked GROUP BY id
        )
        SELECT failed.*, coalesce(best.culprit, '') AS culprit, coalesce(best.symptom, '') AS symptom
        FROM failed LEFT JOIN best USING (id) WHERE state NOT IN ('FAILED', 'REQUEUED') OR best.high
        """
    )


def _find_cascades(connection: Any, gpus_per_node: int) -> bool:
    connection.execute(
        """
        CREATE TABLE restarts AS
        WITH attempts AS (
          SELECT job, start_ns, end_ns, nodes, gpus, node_list FROM jobs
          WHERE job IN (SELECT job FROM failures) AND start_ns IS NOT NULL
        )
        SELECT row_number() OVER () AS id, attempts.job, attempts.start_ns, attempts.node_list
        FROM (SELECT *, lag(start_ns) OVER (PARTITION BY job ORDER BY start_ns) AS earlier_ns FROM attempts) AS attempts
        JOIN failures ON failures.job = attempts.job AND failures.start_ns = attempts.earlier_ns
        """
    )
    connection.execute(
        f"""
        CREATE TABLE preempted AS
        SELECT row_number() OVER () AS id, job, end_ns, node_list,
               if(gpus > 0, gpus, nodes * {gpus_per_node}) AS gpus,
               least((end_ns - start_ns) / {SECOND}, {LOST_AT_MOST_S}) AS lost_s
        FROM jobs WHERE state = 'PREEMPTED' AND start_ns IS NOT NULL AND end_ns IS NOT NULL
        """
    )
    pairs = connection.execute(
        f"""
        WITH moments AS (
          SELECT *, unnest([start_ns // {_GRACE_NS} - 1, start_ns // {_GRACE_NS}, start_ns // {_GRACE_NS} + 1]) AS
          bucket FROM restarts
        )
        SELECT preempted.id, preempted.node_list, moments.id, moments.node_list, moments.job
        FROM (SELECT *, end_ns // {_GRACE_NS} AS bucket FROM preempted) AS preempted JOIN moments USING (bucket)
        WHERE preempted.end_ns BETWEEN moments.start_ns - {_GRACE_NS} AND moments.start_ns + {_MINUTE_NS}
          AND preempted.job <> moments.job
        LIMIT {MAX_PAIRS + 1}
        """
    )
    found: dict[int, str] = {}
    seen = 0
    while rows := pairs.fetchmany(_BATCH):
        seen += len(rows)
        for preempted, its_nodes, _, other_nodes, job in rows:
            if preempted not in found and not _set_of(its_nodes).isdisjoint(_set_of(other_nodes)):
                found[preempted] = job
    _store(connection, "causes", {"id": list(found), "instigator": list(found.values())}, ("int64", "string"))
    connection.execute(
        "CREATE TABLE cascades AS SELECT preempted.*, causes.instigator FROM preempted JOIN causes USING (id)"
    )
    return seen <= MAX_PAIRS


@lru_cache(maxsize=20_000)
def _set_of(node_list: str) -> frozenset[str]:
    return frozenset(_names(node_list))


def _names(node_list: str) -> tuple[str, ...]:
    """None where the list cannot be read: such a job has no evidence."""
    try:
        return expand_node_list(node_list)
    except UsageError:
        return ()


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
        names = _names(node_list)
        batch["node_list"] += [node_list] * len(names)
        batch["node"] += names
        if len(batch["node"]) >= _BATCH:
            yield batch
            batch = {"node_list": [], "node": []}
    yield batch


def _store(connection: Any, name: str, columns: dict[str, list[Any]], types: tuple[str, ...]) -> None:
    import pyarrow

    arrays = {
        key: pyarrow.array(values, type=pyarrow.type_for_alias(kind))
        for (key, values), kind in zip(columns.items(), types, strict=True)
    }
    connection.register(name, pyarrow.table(arrays))
