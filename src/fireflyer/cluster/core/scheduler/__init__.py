"""Which task runs on which nodes: docs/design/0042-scheduler.md."""
