"""Which rank sends what to whom, and how long it takes: plans, trees, programs, the cost model. Pure."""
