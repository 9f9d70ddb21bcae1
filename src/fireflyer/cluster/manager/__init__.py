"""The process of a manager of the platform: store, lease, agents, HTTP."""
