"""What one model does on one kind of device (ModServe §4.1): the file that planner, simulator and budgets read.

`epd-serve profile MODEL` measures it on the devices at hand, `epd-serve profile --calibrate` corrects it by what a
deployment served, and a paper's figures can be written into one by hand. `docs/reference/profile.md` describes each
field. Times are seconds of a stage alone on its device; amounts are tokens of the language model, of an item those that
it has in the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from epd_serve.sim.profile import Line, Profile

ENCODE, PREFILL, DECODE = KINDS = ("encode", "prefill", "decode")
"""Kinds of work, of which a step is a mixture."""


@dataclass(frozen=True)
class Noise:
    """How far the profile is off, as measured on runs that it was not made from; 0 where nobody has looked.

    Attributes:
        ttft, tpot, e2e: median relative error of the prediction. repeat: the same of one run beside the same again.
    """

    ttft: float = 0.0
    tpot: float = 0.0
    e2e: float = 0.0
    repeat: float = 0.0


@dataclass(frozen=True)
class DeviceProfile:
    """One model on one kind of device.

    Attributes:
        model: its name or folder. device: what it ran on. how: `measured`, `calibrated` or `paper`. date: ISO.
        versions: of vLLM, torch and the device's driver. comment: for people.
        stages: by tensor-parallel size, how long steps take and what a stage holds.
        front: from the client to a stage's scheduler, by tokens of a request's items: HTTP, media, the proxy.
        front_busy: of that, the seconds in which it keeps a core of the device busy (CPU only; else 0).
        handover: from the end of an item's encode until another stage can schedule it, by the item's tokens.
        kv: from the end of a prefill until another stage has the KV, by the prompt's tokens: what is exposed of it.
        slowdown: how many times as long both of two kinds of work take while they run side by side on one device, by
            `encode+prefill` and so on; 1 where they do not feel each other, 2 where they take turns.
        weight_bytes: of a stage by its role (`E`, `P`, `D`, `PD`, …), per device, by tensor-parallel size.
        memory_bytes: of a device.
        start_s: from a stage's start until it serves.
        noise: see there.
    """

    model: str
    device: str
    stages: Mapping[int, Profile]
    how: str = "measured"
    date: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    comment: str = ""
    front: Line = Line()
    front_busy: Line = Line()
    handover: Line = Line()
    kv: Line = Line()
    slowdown: Mapping[str, float] = field(default_factory=dict)
    weight_bytes: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    memory_bytes: int = 0
    start_s: float = 0.0
    noise: Noise = Noise()

    def slows(self, one: str, other: str) -> float:
        """Of two kinds of work; a kind beside itself takes turns, and so does what nobody has measured."""
        pair = "+".join(sorted((one, other), key=KINDS.index))
        return self.slowdown.get(pair, 2.0)
