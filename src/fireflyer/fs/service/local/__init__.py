"""A cluster of which all processes run on this machine: `ff fs up`."""
