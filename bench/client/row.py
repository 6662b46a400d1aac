"""The old place of what `bench.clients.records` has now."""

from bench.clients.records import Outcome
from bench.clients.records import RequestRecord as Row

__all__ = ["Outcome", "Row"]
