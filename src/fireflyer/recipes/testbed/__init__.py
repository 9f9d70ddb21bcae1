"""A cluster of `ff up` on this machine for recipes that disturb it: its tasks, what was seen of them, and what must be
true of them afterwards.

`plan`, `facts` and `task_checks` are pure; the others touch processes, clocks and files. `recipes.whole` and
`recipes.soak` decide what is disturbed.
"""
