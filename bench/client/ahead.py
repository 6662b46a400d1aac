"""The old place of what `bench.clients.realtime_priority` has now."""

from bench.clients.realtime_priority import realtime_priority as ahead

__all__ = ["ahead"]
