"""Reads the cluster key: one line in a file that is not everybody's."""

from __future__ import annotations

import stat
from pathlib import Path

from epd_serve.errors import ConfigError

SHORTEST = 16


def read_cluster_key(path: str) -> str:
    """The key.

    Raises:
        ConfigError: none given, unreadable, open to everybody, or too short to be a secret.
    """
    if not path:
        raise ConfigError("give the file with the cluster's key by --cluster-key-file", param="--cluster-key-file")
    file = Path(path)
    make = f"make one with: (umask 077; openssl rand -hex 32 > {path})"
    try:
        mode = file.stat().st_mode
        key = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not plain text"
        raise ConfigError(f"cluster key file {path}: {reason}; {make}", param="--cluster-key-file") from error
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        what = "readable" if mode & stat.S_IROTH else "writable"
        raise ConfigError(f"cluster key file {path} is {what} by everybody: chmod 600 it", param="--cluster-key-file")
    if len(key) < SHORTEST or not all("!" <= letter <= "~" for letter in key):
        raise ConfigError(
            f"cluster key file {path} needs one word of at least {SHORTEST} characters; {make}",
            param="--cluster-key-file",
        )
    return key
