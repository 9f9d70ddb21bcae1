"""Commands of the platform: `ff up`, `ff submit`, `ff ps`, `ff nodes` and others."""
