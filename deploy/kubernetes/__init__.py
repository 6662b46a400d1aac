"""Deployments on Kubernetes: the manifests of one, and how its controller learns of pods."""
