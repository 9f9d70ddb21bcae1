"""A client's session at the manager, the routing that it learns there, and its capabilities."""
