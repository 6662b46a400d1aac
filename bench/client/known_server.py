"""The old place of what `bench.clients.known_server` has now."""

from bench.clients.known_server import MODEL, Known, KnownServer

__all__ = ["Known", "KnownServer", "MODEL"]
