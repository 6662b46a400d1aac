"""The old place of what `bench.clients.resume` has now."""

from bench.clients.resume import keep_runs, read_earlier

__all__ = ["keep_runs", "read_earlier"]
