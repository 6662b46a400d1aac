"""What the proxy knows of the stages: the status table, loads, KV links, features, and where that comes from.

May import `routing` only, for the form in which instances are offered to a policy.
"""
