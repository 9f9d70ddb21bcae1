"""Seconds and memory of `ff reliability` over ten million jobs and fifty million events, and rows per second of
importing `sacct`, each command in a process of its own."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

import duckdb

from bench.report import Bound, Measuring, Options, Result, figure
from fireflyer.base.units import GIB, MIB

__all__ = ["run"]


class Size(NamedTuple):
    jobs: int
    events: int
    sacct_rows: int


SIZES: Final = {
    "tiny": Size(2_000, 10_000, 5_000),
    "brief": Size(1_000_000, 5_000_000, 500_000),
    "full": Size(10_000_000, 50_000_000, 2_000_000),
}
MAX_ROUNDS: Final = 3
LIMIT_S: Final = 60.0
LIMIT_BYTES: Final = 4 * GIB
ROWS_PER_S: Final = 100_000
NODES: Final = 2000
DAYS: Final = 330
DAY_NS: Final = 86_400_000_000_000
BEGIN_NS: Final = 1_700_000_000_000_000_000

_JOBS: Final = f"""
SELECT CAST(i AS VARCHAR) AS job, 'user' || CAST(i % 400 AS VARCHAR) AS "user",
  CASE WHEN r < 0.60 THEN 'COMPLETED' WHEN r < 0.84 THEN 'FAILED' WHEN r < 0.841 THEN 'NODE_FAIL'
       WHEN r < 0.941 THEN 'PREEMPTED' WHEN r < 0.947 THEN 'TIMEOUT' ELSE 'CANCELLED' END AS state,
  nodes, nodes * 8 AS gpus, start_ns - 60000000000 AS submit_ns, start_ns, start_ns + length_ns AS end_ns,
  CAST(r >= 0.6 AS BIGINT) AS exit_code, CAST(0 AS BIGINT) AS signal,
  if(nodes = 1, 'gpu' || CAST(first AS VARCHAR),
     'gpu[' || CAST(first AS VARCHAR) || '-' || CAST(first + nodes - 1 AS VARCHAR) || ']') AS node_list,
  '' AS excluded, CAST(NULL AS BIGINT) AS unsaved_ns, CAST(NULL AS BIGINT) AS overhead_ns,
  'slurm' AS source, CAST(NULL AS BIGINT) AS known_ns
FROM (
  SELECT i, random() AS r, CAST(floor(random() * {NODES - 512}) AS BIGINT) AS first,
    {BEGIN_NS} + CAST(random() * {DAYS * DAY_NS} AS BIGINT) AS start_ns,
    CAST(-ln(1 - random()) * 7200e9 AS BIGINT) AS length_ns,
    CASE WHEN s < 0.93 THEN 1 WHEN s < 0.98 THEN 4 WHEN s < 0.998 THEN 32 ELSE 256 END::BIGINT AS nodes
  FROM (SELECT range AS i, random() AS s FROM range($rows))
)
"""
"""Sizes and states as the reliability paper has them: 93 % of the jobs within a node, 24 % FAILED, 0.1 % NODE_FAIL."""
_EVENTS: Final = f"""
SELECT {BEGIN_NS} + CAST(random() * {DAYS * DAY_NS} AS BIGINT) AS time_ns,
  'gpu' || CAST(CAST(floor(random() * {NODES}) AS BIGINT) AS VARCHAR) AS node,
  CASE WHEN r < 0.3 THEN 'gpu_memory' WHEN r < 0.5 THEN 'ib_link' WHEN r < 0.7 THEN 'filesystem_mount'
       WHEN r < 0.9 THEN 'gpu_unavailable' ELSE 'pcie' END AS symptom,
  if(r < 0.3, 'xid_63', if(r > 0.7 AND r < 0.9, 'xid_79', '')) AS cause,
  CASE WHEN s < 0.9 THEN 'ok' WHEN s < 0.99 THEN 'warn' WHEN s < 0.995 THEN 'low' ELSE 'high' END AS severity,
  'health' AS source, 'check_' || CAST(i % 20 AS VARCHAR) AS "check", '' AS part, '' AS job, false AS user_made,
  '' AS words
FROM (SELECT range AS i, random() AS r, random() AS s FROM range($rows))
"""


def run(options: Options) -> Measuring:
    size = SIZES[options.scale]
    rounds = min(options.rounds, MAX_ROUNDS)
    with tempfile.TemporaryDirectory(prefix="ff-bench-") as directory:
        cases = [case for case in ("report", "lemons", "why") if options.selects(f"reliability/{case}")]
        if cases:
            tables = os.path.join(directory, "tables")
            _write_tables(tables, size)
            for case in cases:
                yield _over_tables(case, tables, size, rounds)
        if options.selects("reliability/import-sacct"):
            yield _importing(directory, size, rounds)
    return (f"{os.cpu_count()} processors; {NODES} nodes, {DAYS} days; tables of DuckDB {duckdb.__version__}",)


class _Measured(NamedTuple):
    seconds: float
    peak_bytes: int
    processor_s: float
    """Of all its threads: what a machine that does other work does not change."""


def _measured(*words: str) -> _Measured:
    """One command as a process: its time, and the most memory that it had."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "fireflyer", "reliability", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stderr.close()
    assert process.returncode == 0, said.decode(errors="replace")
    return _Measured(time.perf_counter() - begin, usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime)


def _over_tables(case: str, tables: str, size: Size, rounds: int) -> Result:
    words = {"report": ("report", tables), "lemons": ("lemons", tables), "why": ("why", "17", "--from", tables)}[case]
    samples = [_measured(*words, "--json") for _ in range(rounds)]
    ours, peak = figure([one.seconds for one in samples]), max(one.peak_bytes for one in samples)
    verdicts: dict[str, bool | None] = {"time": ours.median < LIMIT_S, "memory": peak < LIMIT_BYTES}
    return Result(
        suite="operators", case=f"reliability/{case}", metric="command_s", better="lower", ours=ours, peers={},
        bound=None, target=f"< {LIMIT_S:.0f} s, < {LIMIT_BYTES // GIB} GiB",
        note=f"{size.jobs:,} jobs, {size.events:,} events; {peak / GIB:.2f} GiB at most; "
        f"{samples[0].processor_s:.1f} processor s",
        met=all(verdicts.values()), verdicts=verdicts, more={"peak_bytes": float(peak)},
    )  # fmt: skip


def _importing(directory: str, size: Size, rounds: int) -> Result:
    path = os.path.join(directory, "sacct.txt")
    with open(path, "w") as file:
        file.writelines(_sacct_lines(size.sacct_rows))
    tables = os.path.join(directory, "imported")
    samples = [_measured("import", tables, "--sacct", path, "--json") for _ in range(rounds)]
    ours = figure([one.seconds for one in samples])
    rows_per_s = size.sacct_rows / ours.median
    return Result(
        suite="operators", case="reliability/import-sacct", metric="command_s", better="lower", ours=ours,
        peers={"csv.reader, times as integers": figure([_by_csv(path) for _ in range(rounds)])},
        bound=Bound(_read_s(path), "bytes of the file read once from the page cache"),
        target=f"{ROWS_PER_S:,} rows/s", met=rows_per_s >= ROWS_PER_S, verdicts={"rate": rows_per_s >= ROWS_PER_S},
        note=f"{rows_per_s:,.0f} rows/s of {os.path.getsize(path) / size.sacct_rows:.0f} bytes; "
        f"{max(one.peak_bytes for one in samples) / MIB:.0f} MiB at most; {samples[0].processor_s:.1f} processor s"
    )  # fmt: skip


def _sacct_lines(rows: int) -> Iterator[str]:
    yield "JobID|User|State|Submit|Start|End|NNodes|NodeList|AllocTRES|ExitCode|SubmitLine\n"
    states = ("COMPLETED", "FAILED", "CANCELLED by 1000", "NODE_FAIL", "PREEMPTED")
    for number in range(rows):
        start = 1_700_000_000 + number * 3
        yield (
            f"{number}|user{number % 400}|{states[number % 5]}|{start - 60}|{start}|{start + 100 + number % 9000}|1|"
            f"gpu{number % NODES:04}|billing=64,cpu=64,gres/gpu=8,mem=500G,node=1|{number % 3}:0|sbatch train.sh\n"
        )


def _by_csv(path: str) -> float:
    """What a program would do that only splits the lines and decodes three times."""
    begin = time.perf_counter()
    kept = 0
    with open(path, newline="") as file:
        for row in csv.reader(file, delimiter="|", quoting=csv.QUOTE_NONE):
            kept += row[3].isdigit() and int(row[3]) <= int(row[4]) <= int(row[5])
    assert kept
    return time.perf_counter() - begin


def _read_s(path: str) -> float:
    begin = time.perf_counter()
    with open(path, "rb") as file:
        while file.read(4 * MIB):
            pass
    return time.perf_counter() - begin


def _write_tables(directory: str, size: Size) -> None:
    os.makedirs(directory)
    with duckdb.connect(":memory:") as connection:
        connection.execute("SET memory_limit = '2500MiB'")
        connection.execute("SET preserve_insertion_order = false")
        connection.execute("SELECT setseed(0.5)")
        for kind, query, rows in (("jobs", _JOBS, size.jobs), ("events", _EVENTS, size.events)):
            path = os.path.join(directory, f"{kind}-{'0' * 16}.parquet")
            made = query.replace("$rows", str(rows))
            connection.execute(f"COPY ({made}) TO '{path}' (FORMAT parquet, COMPRESSION zstd)")
