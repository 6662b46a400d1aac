"""The parts of `make test-npu` in order, with what each takes: the most telling first, 45 minutes in all. Pure.

Seconds on a card are estimates: none of it has run on one. They assume a stage of the small model ready within 25 s,
one of 8 billion parameters within 55 s (an encoder within 30 s), one after the other on a device. Seconds on CPU
were measured on two cores that had other work, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.npu.card import EAGER, GRAPHS, MODES


@dataclass(frozen=True)
class Part:
    """One thing that the card has to show.

    Attributes:
        entry: `module:function`; called with a `Rig` in a process of its own.
        card_s, cpu_s: expected. limit_s: after so long it is ended; on CPU too.
        first: parts whose results it reads.
        usual: in a run that names no parts.
        both: it is usual with graphs and without them; else with graphs. Of what can be asked for without: NAME-eager.
        stages: it starts stages of ours that can do without graphs; else there is no mode to it.
        mode: in which it runs.
    """

    name: str
    what: str
    entry: str
    card_s: float
    cpu_s: float
    limit_s: float
    first: tuple[str, ...] = ()
    usual: bool = True
    both: bool = False
    stages: bool = True
    mode: str = GRAPHS

    def expected_s(self, kind: str) -> float:
        return self.cpu_s if kind == "cpu" else self.card_s

    def usual_in(self, modes: tuple[str, ...]) -> tuple[Part, ...]:
        """What its name means where stages may run in these modes."""
        return tuple(map(self._running, modes if self.both or len(modes) == 1 else (GRAPHS,)))

    def everywhere(self) -> tuple[Part, ...]:
        return tuple(dict.fromkeys(map(self._running, MODES[""])))

    def _running(self, mode: str) -> Part:
        if mode == GRAPHS or not self.stages:
            return self
        named = {"name": f"{self.name}-{EAGER}", "what": f"{self.what}; eager"}
        return replace(self, **named, mode=EAGER, first=tuple(f"{name}-{EAGER}" for name in self.first))


_IN = "tests.npu.parts"

PARTS = (
    Part("acceptance", "vllm-ascend's weekly of EPD: 512 requests, 128 at once", f"{_IN}.acceptance:run", 300, 25, 560),
    Part("ops", "device operations of npu_ops against the CPU's", f"{_IN}.ops:run", 45, 5, 180, stages=False),
    Part("plain", "one plain vLLM: starts, answers, what a near tie is", f"{_IN}.plain:run", 60, 70, 240, both=True),
    Part("pd-shm", "P-D: tokens and KV, shared memory", f"{_IN}.layouts:pd_shm", 75, 45, 300, ("plain",), both=True),
    Part("pd-mooncake", "P-D: the same over Mooncake", f"{_IN}.layouts:pd_mooncake", 75, 45, 300, ("plain",)),
    Part("e-pd", "(E-PD): tokens", f"{_IN}.layouts:e_pd", 75, 45, 300, ("plain",), both=True),
    Part("e-to-pd", "E-PD: features from card to card", f"{_IN}.layouts:e_to_pd", 75, 45, 300, ("plain",)),
    Part("ep-d", "(E-P)-D: tokens, features, KV", f"{_IN}.layouts:ep_d", 100, 45, 300, ("plain",), both=True),
    Part("shares", "core shares: read back, and what they change", f"{_IN}.shares:run", 95, 55, 300),
    Part("8b", "8B proportions: TP1, (E-PD), (E-P-D) at four rates", f"{_IN}.eight_b:plain", 455, 155, 575),
    Part("8b-long", "8B: five images, 9,000 tokens, against plain vLLM", f"{_IN}.eight_b:long_prompts", 430, 275, 575),
    Part("8b-shares", "8B at four rates with core shares", f"{_IN}.eight_b:shared", 325, 45, 575),
    Part("exposed", "8B: E→P and P→D, exposed and overlap at 1, 8, 16", f"{_IN}.exposed:run", 165, 40, 420),
    Part(
        "transfer-pd",
        "epd-bench transfer pd, both stages on the card",
        f"{_IN}.benches:transfer_pd",
        55,
        55,
        240,
        stages=False,
    ),
    Part("interference", "epd-bench interference", f"{_IN}.benches:interference", 50, 15, 240, stages=False),
    Part("storm", "decoding beside an encode storm", f"{_IN}.layouts:storm", 150, 90, 420, (), usual=False),
    Part("faults", "kill -9 of E and P beside each other", f"{_IN}.faults:run", 300, 180, 575, ("plain",), usual=False),
)
BUDGET_S = 2700.0


def chosen(names: str, modes: tuple[str, ...] = MODES[""], *, needed: bool = True) -> tuple[Part, ...]:
    """The parts of `a,b` in order, with `needed` those whose results they read, too; the usual ones for "", every one
    for `all`.

    Args:
        modes: in which stages run where a name does not say.

    Raises:
        ValueError: no part has that name.
    """
    every = [one for part in PARTS for one in part.everywhere()]
    meant = {one.name: (one,) for one in every} | {part.name: part.usual_in(modes) for part in PARTS}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if names in ("", "all"):
        wanted = [part.name for part in PARTS if part.usual or names == "all"]
    if unknown := [name for name in wanted if name not in meant]:
        raise ValueError(
            f"no part {unknown[0]!r}: {', '.join(part.name for part in PARTS)}; NAME-{EAGER} without graphs"
        )
    asked = {part for name in wanted for part in meant[name]}
    others = {other for part in asked for other in part.first} if needed else set()
    return tuple(part for part in every if part in asked or part.name in others)


def lines(parts: Sequence[Part], kind: str) -> list[str]:
    """The plan as a table: minutes per part, and when each begins."""
    said = "estimated" if kind != "cpu" else "measured on two cores"
    rows, begun = [f"{'part':14}{'minutes':>8}{'from':>7}{'limit':>7}  what  ({said})"], 0.0
    for part in parts:
        took = part.expected_s(kind)
        rows.append(f"{part.name:14}{took / 60:8.1f}{begun / 60:7.1f}{part.limit_s / 60:7.1f}  {part.what}")
        begun += took
    return [*rows, f"{'in all':14}{begun / 60:8.1f}"]
