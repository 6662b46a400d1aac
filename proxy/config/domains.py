"""Which hosts media may be fetched from, by name: `cdn.example.com` is that host, `*.example.com` all below it.

A name says nothing about the address behind it; addresses are `proxy/media/fetch.py`'s to judge, after this.
"""

from __future__ import annotations

from collections.abc import Iterable

from epd_serve.errors import ConfigError


class DomainRules:
    """Denied beats allowed. No allowed domains at all means every one.

    Raises:
        ConfigError: a pattern that is no host name.
    """

    def __init__(self, allowed: Iterable[str], denied: Iterable[str]) -> None:
        self._allowed = [_pattern(text) for text in allowed]
        self._denied = [_pattern(text) for text in denied]

    def admit(self, host: str) -> bool:
        """Whether `host`, as it stands in the URL (ASCII), may be asked."""
        name = host.lower().rstrip(".")
        if any(_matches(name, pattern) for pattern in self._denied):
            return False
        return not self._allowed or any(_matches(name, pattern) for pattern in self._allowed)


def _pattern(text: str) -> str:
    wildcard = "*." if text.startswith("*.") else ""
    name = text.removeprefix("*.").rstrip(".")
    try:
        ascii_name = name.encode("idna").decode("ascii").lower()
    except UnicodeError:
        ascii_name = ""
    if not ascii_name or any(char in ascii_name for char in "*/:@ "):
        raise ConfigError(f"domain {text!r} is no host name; write cdn.example.com or *.example.com", param="domains")
    return wildcard + ascii_name


def _matches(name: str, pattern: str) -> bool:
    return name.endswith(pattern[1:]) if pattern.startswith("*.") else name == pattern
