"""Transactions per second of the key-value engines."""
