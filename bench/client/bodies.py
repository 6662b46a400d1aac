"""The old place of what `bench.clients.bodies` has now."""

from bench.clients.bodies import chat_body, file_bodies, prepared, spec_bodies, streamed

__all__ = ["chat_body", "file_bodies", "prepared", "spec_bodies", "streamed"]
