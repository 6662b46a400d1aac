"""The old place of what `bench.workloads.custom_dataset` has now."""

from bench.workloads.custom_dataset import NAME

__all__ = ["NAME"]
