"""Which transports KV may take between two instances of one host, in order of preference. Pure.

Two processes on one NPU are the odd pair: Mooncake's Ascend transport cannot connect a device with itself before CANN
9.1, and from there on only with HIXL (Mooncake #2300, #3453), which nobody has run here. Such a pair meets in shared
memory, by decision rather than by trying.
"""

from __future__ import annotations

SHM, MOONCAKE = "shm", "mooncake"


def transports_between(asked: str, device: str, *, beside: bool) -> tuple[str, ...]:
    """By name, the preferred one first.

    Args:
        asked: `auto`, `shm` or `mooncake`: what the operator wants; who wires several hosts says `mooncake`.
        device: `npu`, `cuda` or `cpu`, of both instances.
        beside: they share a device.

    `auto`: NPUs write into each other directly, and fall back to shared memory where a probe finds that they cannot.
    CPU and CUDA meet in shared memory at once: nothing that Mooncake does over TCP is better on one host, and as a mere
    fallback it would make D keep the blocks of every P that dies for 30 s.
    """
    if asked != "auto":
        return (asked,)
    if device != "npu" or beside:
        return (SHM,)
    return (MOONCAKE, SHM)
