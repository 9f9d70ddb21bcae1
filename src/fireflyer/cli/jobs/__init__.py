"""`ff run`, `ff demo`, `ff report`: jobs, what is seen of them, and their reports."""
