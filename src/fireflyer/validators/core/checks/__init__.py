"""The health checks of a node, as pure functions: from what a tool printed, or the kernel counts, to findings.

A check is a function `(Evidence, Policy) -> Outcome`. `evidence` has what was captured, `catalogue` lists the checks
and what each needs to be captured, `policy` what is allowed, and `health_round` makes events of what all checks found.
"""
