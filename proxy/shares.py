"""What one of several proxy processes may do of what the deployment may: limits that are counted by each are divided.

Connections are spread evenly over the processes (`proxy/shared_listener.py`), so an equal part each is what they need.
Rounded up: a limit never becomes 0, which would mean something else.
"""

from __future__ import annotations

from dataclasses import replace

from proxy.settings import ProxySettings


def share_of(settings: ProxySettings, processes: int) -> ProxySettings:
    """The settings of each of `processes`."""
    return replace(
        settings,
        max_in_flight=part(settings.max_in_flight, processes),
        key_limits=settings.key_limits.shared_by(processes),
    )


def part(limit: int, processes: int) -> int:
    """Rounded up."""
    return -(-limit // processes)
