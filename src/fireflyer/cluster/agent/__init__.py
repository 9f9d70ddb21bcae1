"""The agent: resident on a machine, starts and adopts the guards of jobs; see `cluster.core.agent`."""
