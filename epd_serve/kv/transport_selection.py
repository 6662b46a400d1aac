"""Which transports KV may take between two instances, in order of preference. Pure.

Shared memory joins workers of one node; between nodes there is Mooncake. Node is what wiring says, never an address.

Two processes on one NPU are the odd pair: Mooncake's Ascend transport cannot connect a device with itself before CANN
9.1, and from there on only with HIXL (Mooncake #2300, #3453), which nobody has run here. Such a pair meets in shared
memory, by decision rather than by trying.
"""

from __future__ import annotations

SHM, MOONCAKE = "shm", "mooncake"


def transports_between(asked: str, device: str, *, colocated: bool, same_node: bool | None = True) -> tuple[str, ...]:
    """By name, the preferred one first.

    Args:
        asked: `auto`, `shm` or `mooncake`: what the operator wants.
        device: `npu`, `cuda` or `cpu`, of both instances.
        colocated: they share a device.
        same_node: they are on one node. None: that is not known yet, so D judges (`why_not`).

    `auto`: NPUs write into each other directly, and fall back to shared memory where a probe finds that they cannot.
    CPU and CUDA meet in shared memory at once: nothing that Mooncake does over TCP is better on one node, and as a mere
    fallback it would make D keep the blocks of every P that dies for 30 s.
    """
    if asked != "auto":
        return (asked,)
    if same_node is False:
        return (MOONCAKE,)
    here = (SHM,) if device != "npu" or colocated else (MOONCAKE, SHM)
    return here if same_node or MOONCAKE in here else (*here, MOONCAKE)


def why_not(transport: str, asked: str, device: str, *, here: str, there: str) -> str:
    """Why D, on node `here`, takes no KV by this transport from a worker of node `there`; "" where it does."""
    if transport == SHM and here != there:
        return f"shared memory joins workers of one node: {here} here, {there} there"
    ways = transports_between(asked, device, colocated=False, same_node=here == there)
    if transport not in ways:
        return f"transport: {' or '.join(ways)} here, {transport} there"
    return ""


def between(here: str, there: str) -> str:
    """What a report says of the nodes of a link that is up: "" where it is one."""
    return "" if here == there else f"from node {here} to node {there}"
