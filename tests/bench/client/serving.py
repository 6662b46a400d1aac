"""The old place of what `tests.bench.clients.serving` has now."""

from tests.bench.clients.serving import Served

__all__ = ["Served"]
