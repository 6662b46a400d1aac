"""What one of several proxy processes may do of what the deployment may: limits that are counted by each are divided.

What is with the stages at once is divided by `proxy/admission/capacity.py`, which is told how many processes there are.
Connections are spread evenly over the processes (`proxy/server/shared_listener.py`), so an equal part each is what they
need. Rounded up: a limit never becomes 0, which would mean something else.
"""

from __future__ import annotations

from dataclasses import replace

from proxy.config.settings import ProxySettings


def share_of(settings: ProxySettings, processes: int) -> ProxySettings:
    """The settings of each of `processes`."""
    return replace(
        settings,
        max_in_flight=part(settings.max_in_flight, processes),
        key_limits=settings.key_limits.shared_by(processes),
        admission=replace(
            settings.admission,
            text_queue=part(settings.admission.text_queue, processes),
            media_queue=part(settings.admission.media_queue, processes),
        ),
        retry=replace(
            settings.retry,
            floor_per_s=settings.retry.floor_per_s / processes,
            burst=part(settings.retry.burst, processes),
        ),
        processes=processes,
    )


def part(limit: int, processes: int) -> int:
    """Rounded up."""
    return -(-limit // processes)
