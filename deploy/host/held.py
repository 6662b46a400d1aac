"""A file that a process keeps locked for as long as it lives: whoever finds it unlocked knows that process has ended.

The kernel lets go of the lock however the process ends, and it is seen from every PID namespace, which no pid is. The
lock lies where that lies whose owner it tells: a directory in /tmp and memory in /dev/shm may be shared by different
containers.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import BinaryIO


def hold(path: Path) -> BinaryIO:
    """Makes the file, locked from the moment it has its name. Closing it lets go; children that exec do not inherit it.

    Raises:
        OSError: it exists, or cannot be made.
    """
    unnamed = path.with_name(f".{path.name}")
    file = unnamed.open("xb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(path)
    except OSError:
        file.close()
        unnamed.unlink(missing_ok=True)
        raise
    return file


def is_held(path: Path) -> bool | None:
    """Whether somebody holds it; None where there is no such file of this user's."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                return None
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False
