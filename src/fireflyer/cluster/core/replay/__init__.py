"""Replay of traces: what a policy makes of a month of tasks on nodes that fail: docs/design/0042-scheduler.md."""
