"""The certificate of the clients' port, by files: read at the start, and again when they have changed.

Connections that are open keep what they began with. Files that cannot be used change nothing: a line says so, and the
certificate stays as it was.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from epd_serve.errors import ConfigError

logger = logging.getLogger(__name__)
LOOK_S = 2.0
HANDSHAKE_S = 10.0
"""How long a client may take to say who it talks to."""


class Certificate:
    """Args:
        cert_file: PEM, with the chain. key_file: PEM, of its key, without a passphrase.

    Attributes:
        context: for connections that begin now.

    Raises:
        ConfigError: they cannot be read, or do not belong together.
    """

    def __init__(self, cert_file: str, key_file: str) -> None:
        self._files = (cert_file, key_file)
        self._seen = self._stamps()
        self.context = _context(cert_file, key_file)

    async def watch(self) -> None:
        """Have `context` be what the files say, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Once. Of two files that are replaced one after the other, the first does not fit the second for a moment: it
        is tried again when that has changed, too."""
        stamps = self._stamps()
        if stamps == self._seen:
            return
        self._seen = stamps
        try:
            self.context = _context(*self._files)
        except ConfigError as error:
            logger.error("the certificate stays as it was: %s", error)
        else:
            logger.warning("new connections get the certificate in %s as it is now", self._files[0])

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(Path(file)) for file in self._files]


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _context(cert_file: str, key_file: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert_file, key_file, password=_no_passphrase)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"certificate {cert_file} with key {key_file}: {why}", param="--tls-cert-file") from error
    return context


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase")
