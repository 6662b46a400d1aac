"""Where an OpenAI server is: scheme, host, port and the path before `/v1`. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from epd_serve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server. `base_path` comes before every path, and is mostly empty."""

    host: str
    port: int
    tls: bool = False
    base_path: str = ""

    @classmethod
    def of(cls, url: str) -> Endpoint:
        """From `http://HOST:PORT`, with or without the `/v1` that clients write after it.

        Raises:
            ConfigError: it is no such address.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r}: {error}; give http://HOST:PORT", param="URL") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is no address of a server; give http://HOST:PORT", param="URL")
        if parts.query or parts.fragment or parts.username:
            raise ConfigError(f"{url!r}: give http://HOST:PORT alone", param="URL")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, path)

    @property
    def netloc(self) -> str:
        """As the header `host` has it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"http{'s' if self.tls else ''}://{self.netloc}{self.base_path}"
