"""The old place of what `bench.clients.slo` has now."""

from bench.clients.metrics import faults, summary
from bench.clients.slo import attainment

__all__ = ["attainment", "faults", "summary"]
