"""The chunk store: reads, writes and their delays, beside what sockets and disk of this machine can do."""
