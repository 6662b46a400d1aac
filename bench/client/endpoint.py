"""The old place of what `bench.clients.http` has now."""

from bench.clients.http import Endpoint

__all__ = ["Endpoint"]
