"""The old place of what `tests.bench.clients.made` has now."""

from tests.bench.clients.made import failed, row

__all__ = ["failed", "row"]
