"""The old place of what `bench.clients.target` has now."""

from bench.clients.target import Request as Ask
from bench.clients.target import Target
from bench.clients.target import Target as InTurn

__all__ = ["Ask", "InTurn", "Target"]
