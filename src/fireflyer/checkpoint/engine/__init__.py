"""The engine of checkpoints: performs what the save machine asks for, and reads what was saved.

All IO goes through the `Disk` port, so the simulation crashes this very code at each of its operations.
"""
