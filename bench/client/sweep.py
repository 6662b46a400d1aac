"""The old place of what `bench.clients.sweep` has now."""

from bench.clients.sweep import Sweep, label_of, labels
from bench.clients.sweep import SweepResult as Found

__all__ = ["Found", "Sweep", "label_of", "labels"]
