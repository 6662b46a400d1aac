"""Phase stamps of one process, stage or proxy: JSON lines of (subject, event, monotonic seconds) for the breakdown.

CLOCK_MONOTONIC is shared by the processes of one host, so stamps of different stages can be subtracted. Subjects are
the proxy's request ids, and at the stages feature keys and transfer ids too; the proxy's stamps `media` and
`dispatched` carry the keys and the transfer id, which joins the files. An event that took time says since when, in
`t0`.
"""

from __future__ import annotations

import contextlib
import json
import os
import time

PROXY = "proxy"


class Trace:
    """Appends stamps to one file; lines of several processes do not mix (O_APPEND, one write per line).

    Args:
        path: the file, or "" for a trace that does nothing.
        instance: whose stamps they are.
    """

    def __init__(self, path: str, instance: str) -> None:
        self._instance = instance
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if path else -1

    def stamp(self, subject: str, event: str, **more: object) -> None:
        """Record that `event` happened to `subject` now. Lost where the disk is full: it must not end who serves."""
        if self._fd >= 0:
            record = {"t": time.monotonic(), "instance": self._instance, "subject": subject, "event": event, **more}
            with contextlib.suppress(OSError):
                os.write(self._fd, json.dumps(record).encode() + b"\n")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
