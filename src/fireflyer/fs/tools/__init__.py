"""What the commands of `ff fs` do with files, here or in a cluster: copying, comparing and walking."""
