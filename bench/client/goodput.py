"""The old place of what `bench.clients.goodput` has now."""

from bench.clients.goodput import Search, wilson

__all__ = ["Search", "wilson"]
