"""The old place of what `bench.clients.response_status` has now."""

from bench.clients.response_status import CROWDED, judge

__all__ = ["CROWDED", "judge"]
