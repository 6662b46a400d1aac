"""The old place of what `bench.clients.metrics` has now."""

from bench.clients.metrics import Window, steady_window

__all__ = ["Window", "steady_window"]
