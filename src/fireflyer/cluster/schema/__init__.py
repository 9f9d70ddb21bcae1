"""Structs of the cluster package that cross a boundary: the job, its result, and the supervisor's protocol."""
