"""The old place of what `bench.phases` has now."""

from bench.clients.sweep import joined
from bench.phases import SEEN_BY_PROXY, SENT, mean_phases

__all__ = ["SEEN_BY_PROXY", "SENT", "joined", "mean_phases"]
