"""Phase stamps of the proxy: JSON lines of (subject, event, monotonic seconds), in the format of the stages' traces.

The subject is the request id; the stamp `media_loaded` carries the feature keys and `dispatched` the transfer id, the
subjects of the stages' stamps. CLOCK_MONOTONIC is shared by the processes of one host: the files can be joined.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

INSTANCE = "proxy"


class Trace:
    """Appends stamps to one file; without a path it does nothing."""

    def __init__(self, path: Path | None) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if path else -1

    def stamp(self, request_id: str, event: str, **more: object) -> None:
        """Record that `event` happened to the request now."""
        if self._fd >= 0:
            line = {"t": time.monotonic(), "instance": INSTANCE, "subject": request_id, "event": event, **more}
            os.write(self._fd, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
