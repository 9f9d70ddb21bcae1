"""The cluster manager: lease, ledger, chains, migration of chains. Pure."""
