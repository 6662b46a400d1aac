"""The old place of what `bench.clients.bodies` has now."""

from bench.clients.bodies import CLOSED_LOOP_REQUESTS, FileSource, Requests, Source, WorkloadSource

__all__ = ["CLOSED_LOOP_REQUESTS", "FileSource", "Requests", "Source", "WorkloadSource"]
