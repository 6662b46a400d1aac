"""The old place of what `bench.clients.sender` has now."""

from bench.clients.sender import Bounds, Run

__all__ = ["Bounds", "Run"]
