"""Chain replication (CRAQ) on a storage node: replicas, resync, reads, the node's membership. Pure."""
