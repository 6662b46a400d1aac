"""A file of the machine that may not be there."""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path) -> str:
    """Returns what the file says; "" where it cannot be read, for facts that then stay unknown."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
