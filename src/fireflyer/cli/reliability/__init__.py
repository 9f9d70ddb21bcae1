"""`ff reliability`: failures of a cluster, from mathematics to the cause of one."""
