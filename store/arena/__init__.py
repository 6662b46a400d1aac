"""Tier 1 of the MM Store: the host's shared memory."""

from store.arena.arena import Arena, Lease, Reservation

__all__ = ["Arena", "Lease", "Reservation"]
