"""The pure half of the key-value engine: limits, conflict sets, the resolver, buffered writes, the map in memory."""
