"""`ff fs admin`: users, nodes, placement, and metadata when the cluster is down."""
