"""Addresses, ports and names as operators write them."""

from __future__ import annotations

import re

from epd_serve.errors import ConfigError

LEAST_NODE_PORTS = 64
"""An instance takes a handful, and two for each of its ranks."""

_HOST = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?|\[[0-9A-Fa-f:.]+\]")
_NAME = re.compile("[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")


def host_and_port(address: str, param: str = "mooncake_master") -> tuple[str, int]:
    """`10.0.0.1:50051` or `[fd00::1]:50051` as host and port.

    Raises:
        ConfigError: it is something else.
    """
    host, colon, port = address.rpartition(":")
    right = colon and _HOST.fullmatch(host) and re.fullmatch("[0-9]{1,5}", port)
    if not (right and 1 <= int(port) <= 65535):
        raise ConfigError(f"{param} {address!r} is not HOST:PORT", param=param)
    return host.removeprefix("[").removesuffix("]"), int(port)


def port_range(text: str) -> range:
    """The ports of `20000-24999`.

    Raises:
        ConfigError: it is something else, or too few for the stages of a node.
    """
    match = re.fullmatch("([0-9]{1,5})-([0-9]{1,5})", text)
    ports = range(int(match[1]), int(match[2]) + 1) if match is not None else range(0)
    if not (len(ports) >= LEAST_NODE_PORTS and ports[0] >= 1024 and ports[-1] <= 65535):
        raise ConfigError(
            f"node_ports {text!r} is not FIRST-LAST between 1024 and 65535 with at least {LEAST_NODE_PORTS} ports, "
            "such as 20000-24999",
            param="node_ports",
        )
    return ports


def check_name(name: str) -> None:
    """Raises ConfigError where it cannot name a deployment."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"name {name!r}: up to 40 small letters, digits and dashes, such as qwen-eu", param="name")
