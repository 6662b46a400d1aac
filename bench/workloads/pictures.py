"""The old place of what `bench.workloads.images` has now."""

from bench.workloads.images import Images as Pictures

__all__ = ["Pictures"]
