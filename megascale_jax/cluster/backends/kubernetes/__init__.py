"""Nodes as pods of a JobSet: `manifests.py` says what there is, `backend.py` what the driver does to it; `client.py` alone asks a cluster.

A node is an index of an Indexed Job, its *machine* the cluster's node that the pod is on. The Job controller makes the pods; the driver
looks at them, keeps bad machines away from everybody (cordon), and moves pods off them (eviction).
"""
