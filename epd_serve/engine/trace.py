"""Phase stamps of one stage process: JSON lines of (request, event, monotonic seconds), for the latency breakdown.

CLOCK_MONOTONIC is shared by the processes of one host, so stamps of different stages can be subtracted.
"""

from __future__ import annotations

import json
import os
import time


class Trace:
    """Appends stamps to one file; lines of several processes do not mix (O_APPEND, one write per line)."""

    def __init__(self, path: str, instance: str) -> None:
        self._instance = instance
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if path else -1

    def stamp(self, subject: str, event: str, **more: object) -> None:
        """Record that `event` happened to `subject` (a feature key or a transfer id) now."""
        if self._fd >= 0:
            line = {"t": time.monotonic(), "instance": self._instance, "subject": subject, "event": event, **more}
            os.write(self._fd, json.dumps(line).encode() + b"\n")
