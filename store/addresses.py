"""How a host and a port are written: the one rule that an IPv6 address needs."""

from __future__ import annotations


def authority(host: str, port: int) -> str:
    """`10.0.0.4:8000`, `name:8000`, or `[fd00::4]:8000`: as in a URL, a ZMQ address or a Mooncake session."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
