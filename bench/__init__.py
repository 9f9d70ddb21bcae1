"""Benchmarks: ours, the peers and the physical limit, measured in the same run. `python -m bench --help`."""
