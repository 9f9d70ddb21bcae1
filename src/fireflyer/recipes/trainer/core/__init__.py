"""Decisions of a training run, pure: what a recipe says and whether it can be executed, what is due at a step, what to
do about a bad step, what a metrics line holds, and what paired runs show."""
