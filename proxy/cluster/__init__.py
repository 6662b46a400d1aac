"""Stages of other hosts: which of them belong to the cluster, whether they fit it, and the calls they make.

May import `registry`, where their instances are kept, and `tenants`, for the keys.
"""
