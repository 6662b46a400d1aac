"""The old place of what `bench.clients.measure` has now."""

from bench.clients.measure import Measured, Plan, judged, measure

__all__ = ["Measured", "Plan", "judged", "measure"]
