"""A deployment on several hosts: who controls it, and its nodes, whoever places these (`deploy/ray`, Kubernetes)."""
