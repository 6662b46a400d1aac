"""Where something answers, as it is written: the rules that an IPv6 address needs."""

from __future__ import annotations


def authority(host: str, port: int) -> str:
    """`10.0.0.4:8000`, `name:8000`, or `[fd00::4]:8000`: as in a URL, a ZMQ address or a Mooncake session."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def environment_at(host: str) -> dict[str, str]:
    """What a process that uses Mooncake at this address has to have in its environment. Without the second entry it
    looks for peers by IPv4 alone."""
    return {"MC_TCP_BIND_ADDRESS": host, **({"MC_USE_IPV6": "1"} if ":" in host else {})}
