"""Tier 1 of the MM Store: the host's shared memory."""

from store.arena.arena import Arena as Arena
from store.arena.arena import Lease as Lease
from store.arena.arena import Reservation as Reservation
