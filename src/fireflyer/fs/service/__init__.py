"""Shells: the processes of the file system's services, and what they need to perform the effects of its machines."""
