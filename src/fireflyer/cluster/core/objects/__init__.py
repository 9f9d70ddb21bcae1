"""Blobs, manifests of snapshots, what may be collected, and logs on their way: the decisions of `cluster.objects`."""
