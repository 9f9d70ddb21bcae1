"""From rank to rank: connections, messages, and sums that are made of these."""
