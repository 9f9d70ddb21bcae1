"""The meta service: requests about names and files over a key-value engine."""
