"""Keys in files that are not everybody's: a deployment's and the admin listener's. Leaves those of clients to
`proxy/config/keys.py`.

Whoever has the key of a deployment on several machines is a member. Members derive from it what they show each other:
a bearer token for the stages' HTTP servers, and the key pair of their ZMQ sockets (`epd_serve.sockets`). None of these
tells the key, or another one of them; but who sees one may try keys, so it has to be one that nobody guesses.
"""

from __future__ import annotations

import hashlib
import hmac
import stat
from pathlib import Path

from epd_serve.errors import ConfigError

SHORTEST = 16


def derived_key(key: str, purpose: str) -> bytes:
    """32 bytes for one purpose."""
    return hmac.new(key.encode(), purpose.encode(), hashlib.sha256).digest()


def stage_key(key: str) -> str:
    """The bearer token of the stages' own servers: their environment holds it instead of the deployment's key."""
    return derived_key(key, "epd-serve/stage-key/1").hex()


def read_key(path: str, flag: str) -> str:
    """The key in a file that a flag names.

    Raises:
        ConfigError: unreadable, open to everybody, or too short to be a secret.
    """
    key = read_secret(path, flag).strip()
    if len(key) < SHORTEST or not _is_word(key):
        raise ConfigError(
            f"{_named(flag)} {path} needs one word of at least {SHORTEST} characters; {_make(path)}", param=flag
        )
    return key


def read_secret(path: str, flag: str, *, fix: str = "") -> str:
    """The text of a file that a flag names. Raises ConfigError: unreadable, with how to mend it, or open to others."""
    file = Path(path)
    try:
        mode = file.stat().st_mode
        text = file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not plain text"
        raise ConfigError(f"{_named(flag)} {path}: {reason}; {fix or _make(path)}", param=flag) from error
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        how = "readable" if mode & stat.S_IROTH else "writable"
        raise ConfigError(f"{_named(flag)} {path} is {how} by everybody: chmod 600 it", param=flag)
    return text


def _is_word(key: str) -> bool:
    return all("!" <= letter <= "~" for letter in key)


def _named(flag: str) -> str:
    return flag.removeprefix("--").replace("-", " ").replace("_", " ")


def _make(path: str) -> str:
    return f"make one with: (umask 077; openssl rand -hex 32 > {path})"
