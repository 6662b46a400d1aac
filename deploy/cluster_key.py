"""Reads a key, the cluster's or the admin listener's: one line in a file that is not everybody's."""

from __future__ import annotations

import hashlib
import shlex
import stat
from pathlib import Path

from epd_serve.errors import ConfigError

SHORTEST = 16
_ADMIN = "epd-serve/admin-key/1/"


def read_cluster_key(path: str) -> str:
    """The cluster's key. Raises ConfigError as `read_key`, and when none is given."""
    if not path:
        raise ConfigError("give the file with the cluster's key by --cluster-key-file", param="--cluster-key-file")
    return read_key(path, "--cluster-key-file")


def admin_key(cluster_key: str) -> str:
    """What the operators of a head have who gave it no key for them. Derived, so that Prometheus and whoever else reads
    along does not hold the cluster key, with which one may join."""
    return hashlib.sha256((_ADMIN + cluster_key).encode()).hexdigest()


def admin_key_command(path: str) -> str:
    """A shell command that prints `admin_key` of the cluster key in the file `path`; no process list shows either."""
    return f"(printf {_ADMIN}; tr -d '[:space:]' < {shlex.quote(path)}) | sha256sum | cut -c-64"


def read_key(path: str, flag: str) -> str:
    """The key in a file that a flag names.

    Raises:
        ConfigError: unreadable, open to everybody, or too short to be a secret.
    """
    what = flag.removeprefix("--").replace("-", " ")
    file = Path(path)
    make = f"make one with: (umask 077; openssl rand -hex 32 > {path})"
    try:
        mode = file.stat().st_mode
        key = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not plain text"
        raise ConfigError(f"{what} {path}: {reason}; {make}", param=flag) from error
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        how = "readable" if mode & stat.S_IROTH else "writable"
        raise ConfigError(f"{what} {path} is {how} by everybody: chmod 600 it", param=flag)
    if len(key) < SHORTEST or not all("!" <= letter <= "~" for letter in key):
        raise ConfigError(
            f"{what} {path} needs one word of at least {SHORTEST} characters; {make}",
            param=flag,
        )
    return key
