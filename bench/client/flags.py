"""The old place of what `bench.clients.flags` has now."""

from bench.clients.flags import arrivals_at, parse_rates

__all__ = ["arrivals_at", "parse_rates"]
