"""`ff host`: all processes of one host of a cluster, from the one file that describes the cluster."""
