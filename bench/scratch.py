"""Scratch folders of a measurement: short names, for sockets lie in them, and gone even after one that was killed.

A folder carries the process that made it in its name; whoever makes the next one removes those of the dead.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/tmp")
SETTLED_S = 120.0
"""What a killed measurement had started takes its time to end, and needs its folder for it."""
_NAME = re.compile(r"epd-bench-(\d+)-")


@contextlib.contextmanager
def scratch(root: Path = ROOT) -> Iterator[Path]:
    """A new folder, removed at the end of the context."""
    remove_dead(root)
    with tempfile.TemporaryDirectory(prefix=f"epd-bench-{os.getpid()}-", dir=root) as made:
        yield Path(made)


def remove_dead(root: Path = ROOT, settled_s: float = SETTLED_S) -> None:
    """Remove folders of measurements that are dead, unless they changed lately or are somebody else's."""
    for found in root.glob("epd-bench-*"):
        name = _NAME.match(found.name)
        with contextlib.suppress(OSError):  # gone meanwhile
            about = found.lstat()
            if name is None or Path(f"/proc/{name[1]}").exists() or about.st_uid != os.getuid():
                continue
            if time.time() - about.st_mtime >= settled_s:
                shutil.rmtree(found, ignore_errors=True)
