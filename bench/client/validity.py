"""The old place of what `bench.clients.measure` has now."""

from bench.clients.measure import Objection, Rules, objections

__all__ = ["Objection", "Rules", "objections"]
