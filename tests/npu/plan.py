"""The parts of `make test-npu` in order, with what each takes: the most telling first, 25 minutes in all. Pure.

Seconds on a card are estimates: none of it has run on one. They assume a stage of the small model ready within 25 s,
one of 8 billion parameters within 55 s (an encoder within 30 s), one after the other on a device. Seconds on CPU
were measured on two cores that had other work, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One thing that the card has to show.

    Attributes:
        entry: `module:function`; called with a `Rig` in a process of its own.
        card_s, cpu_s: expected. limit_s: after so long it is ended; on CPU too.
        first: parts whose results it reads.
        usual: in a run that names no parts.
    """

    name: str
    what: str
    entry: str
    card_s: float
    cpu_s: float
    limit_s: float
    first: tuple[str, ...] = ()
    usual: bool = True

    def expected_s(self, kind: str) -> float:
        return self.cpu_s if kind == "cpu" else self.card_s


_IN = "tests.npu.parts"

PARTS = (
    Part("ops", "device operations of npu_ops against the CPU's", f"{_IN}.ops:run", 45, 5, 180),
    Part("plain", "one plain vLLM: starts, answers, what a near tie is", f"{_IN}.plain:run", 60, 70, 240),
    Part("pd-shm", "P-D: tokens and KV, over shared memory", f"{_IN}.layouts:pd_shm", 75, 45, 300, ("plain",)),
    Part("pd-mooncake", "P-D: the same over Mooncake", f"{_IN}.layouts:pd_mooncake", 75, 45, 300, ("plain",)),
    Part("ep-d", "(E-P)-D: tokens, features, KV", f"{_IN}.layouts:ep_d", 100, 45, 300, ("plain",)),
    Part("shares", "core shares: read back, and what they change", f"{_IN}.shares:run", 95, 55, 300),
    Part("8b", "8B proportions: TP1, (E-PD), (E-P-D) at four rates", f"{_IN}.eight_b:plain", 455, 155, 575),
    Part("8b-shares", "the same with core shares", f"{_IN}.eight_b:shared", 325, 45, 575),
    Part("exposed", "8B: E→P and P→D, exposed and overlap at 1, 8, 16", f"{_IN}.exposed:run", 165, 40, 420),
    Part("transfer-pd", "epd-bench transfer pd, both stages on the card", f"{_IN}.benches:transfer_pd", 55, 55, 240),
    Part("interference", "epd-bench interference (EPD-Serve, Fig. 6)", f"{_IN}.benches:interference", 50, 15, 240),
    Part("storm", "decoding beside an encode storm", f"{_IN}.layouts:storm", 150, 90, 420, (), usual=False),
    Part("faults", "kill -9 of E and P beside each other", f"{_IN}.faults:run", 300, 180, 575, ("plain",), usual=False),
)
BUDGET_S = 1500.0


def chosen(names: str, *, needed: bool = True) -> tuple[Part, ...]:
    """The parts of `a,b` in order, with `needed` those whose results they read, too; the usual ones for "", every one
    for `all`.

    Raises:
        ValueError: no part has that name.
    """
    known = {part.name: part for part in PARTS}
    if names in ("", "all"):
        return tuple(part for part in PARTS if part.usual or names == "all")
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"no part {unknown[0]!r}: {', '.join(known)}")
    others = {other for name in wanted for other in known[name].first} if needed else set()
    return tuple(part for part in PARTS if part.name in {*wanted, *others})


def lines(parts: Sequence[Part], kind: str) -> list[str]:
    """The plan as a table: minutes per part, and when each begins."""
    said = "estimated" if kind != "cpu" else "measured on two cores"
    rows, begun = [f"{'part':14}{'minutes':>8}{'from':>7}{'limit':>7}  what  ({said})"], 0.0
    for part in parts:
        took = part.expected_s(kind)
        rows.append(f"{part.name:14}{took / 60:8.1f}{begun / 60:7.1f}{part.limit_s / 60:7.1f}  {part.what}")
        begun += took
    return [*rows, f"{'in all':14}{begun / 60:8.1f}"]
