"""The decisions of the chunk store: who may do what until when, and what a replica does with an update. Pure."""
