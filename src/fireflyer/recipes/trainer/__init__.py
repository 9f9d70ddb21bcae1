"""Training from a recipe: `ff train run` and `ff train compare`.

`core` decides, without IO: what a recipe says and whether it can be executed, what is due at a step, what to do about a
bad step, what paired runs show. Around it: `models` and `sources` make what a recipe names, `arrangements` divide it
over ranks, `run` is one rank from its start to its end, `compare` starts pairs of runs.
"""
