"""The old place of what `bench.clients.sse` has now."""

from bench.clients.sse import events
from bench.clients.sse import read_answer as read_stream
from bench.clients.sse import shortened as said

__all__ = ["events", "read_stream", "said"]
