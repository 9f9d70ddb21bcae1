"""The storage process: its targets, their engines and directories, its data connections."""
