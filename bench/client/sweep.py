"""The old place of what `bench.clients.sweep` has now."""

from bench.clients.sweep import Found, Sweep, label_of, labels

__all__ = ["Found", "Sweep", "label_of", "labels"]
