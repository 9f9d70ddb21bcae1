"""How the ranks of a group find each other: rendezvous, membership, authenticated connections, shared memory."""
