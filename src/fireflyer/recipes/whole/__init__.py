"""The whole demonstration, `ff demo --whole`: a platform, a file system, three tasks and three disturbances.

    plan ──> director ── what to do next ──> run ── does it, and writes down what it sees ──> facts ──> checks, report

`plan`, `director`, `facts`, `checks` and `report` are pure; `run` and what it uses (`reference`, `watching`, `traffic`,
`breaking`) touch processes, clocks and files.
"""
