"""A platform of which all processes run on this machine: `ff up`."""
