"""Weeks of a fleet whose nodes fail, with the loop of checks, repairs and lemon nodes, and without it:
docs/design/0102-fleet-simulation.md."""
