"""The soak, `ff soak`: tasks and writers on a cluster of `ff up` that loses processes, links and space all the time.

    plan, faults ──> director ── which fault is next, and when one is over ──> run ──> facts ──> checks, report

`faults`, `plan`, `seen`, `director`, `acknowledged`, `facts`, `checks` and `report` are pure; `run` and what it uses
(`injector`, `relay`, `small_disks`, `preparing`, `watching`, `writers`) touch processes, clocks and files.
"""
