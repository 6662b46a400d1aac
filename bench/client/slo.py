"""The old place of what `bench.clients.slo` has now."""

from bench.clients.slo import PAPER, Slo, counted, own_attained, parse_slos

__all__ = ["PAPER", "Slo", "counted", "own_attained", "parse_slos"]
