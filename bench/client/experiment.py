"""The old place of what `bench.clients.resume` has now."""

from bench.clients.resume import difference

__all__ = ["difference"]
