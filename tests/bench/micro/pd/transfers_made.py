"""P→D transfers as their stamps would tell them: eight layers of 10 ms, the last 5 ms of the step for what follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.micro.measurement import Row
from bench.micro.pd.figures import row_of
from bench.micro.pd.transfers import Packet, PrefillStep, Transfer
from epd_serve.phases.stamps import Stamp

BEGUN, LAYERS, LAYER_S, REST_S = 100.0, 8, 0.01, 0.005
PREFILL_END = BEGUN + LAYERS * LAYER_S + REST_S
STEP = PrefillStep(BEGUN, PREFILL_END, 1024, tuple(BEGUN + layer * LAYER_S for layer in range(1, LAYERS + 1)))


def transfer(groups: Sequence[int] = (8,), *, busy_s: float = 0.002, exposed_s: float = 0.001) -> Transfer:
    """One packet per group, each from when its last layer was written, for `busy_s`; a megabyte per layer."""
    packets, first = [], 0
    for layers in groups:
        last = first + layers
        begun = STEP.layers[last - 1]
        packets.append(Packet(begun, begun + busy_s, busy_s, first, last, layers * 1_000_000))
        first = last
    return Transfer("t", tuple(packets), (STEP,), packets[0].begun, PREFILL_END, PREFILL_END + exposed_s)


def row(mode: str, exposed_ms: float, *, turn: int = 0, **case: Any) -> Row:
    groups = {"bulk": (8,), "layerwise": (1,) * 8, "fixed:2": (2,) * 4, "fixed:4": (4, 4)}.get(mode, (5, 2, 1))
    case = {"transport": "shm", "tokens": 1024, "concurrency": 1, **case}
    return row_of(transfer(groups, exposed_s=exposed_ms / 1e3), [0.3], **case, mode=mode, round=turn)


def stamps(one: Transfer, **wrong: Any) -> list[Stamp]:
    """What proxy, P and D stamp for it, as request `request-t`."""
    at = {"prefill_start": BEGUN - 0.001, "kv_first": one.first_packet, "prefill_end": one.prefill_end}
    made = [Stamp(BEGUN - 0.1, "proxy", f"request-{one.id}", "dispatched", {"path": "P-D", "transfer": one.id})]
    made += [Stamp(t, "P0", one.id, event, {}) for event, t in at.items()]
    made += [
        Stamp(one.done, "D0", one.id, "kv_done", {"ok": True}),
        Stamp(one.done + 0.001, "P0", one.id, "kv_sent", {"ok": True, **wrong}),
    ]
    for packet in one.packets:
        more = {"t0": packet.begun, "t1": packet.ended, "busy_s": packet.busy_s, "first": packet.first}
        more |= {"last": packet.last, "bytes": packet.nbytes, "transfers": [one.id, "another"], "link": "D0"}
        made.append(Stamp(packet.ended, "P0", "link:D0", "kv_packet", more))
    for step in one.steps:
        more = {"t0": step.begun, "tokens": step.tokens, "layers": list(step.layers)}
        made.append(Stamp(step.ended, "P0", "step", "prefill_step", more))
    return sorted(made, key=lambda stamp: stamp.t)
