"""kill -9 of a stage beside another one on its device: the neighbour lives, what was killed gets its part back."""

from __future__ import annotations

import signal

from npu_ops.discovery import discover
from npu_ops.properties import read_properties
from tests.e2e.bodies import about
from tests.e2e.demo_prompts import PAIRWISE_DIFFERENT, DemoPrompt
from tests.npu.answers import answered, difference, is_near_tie
from tests.npu.card import Card
from tests.npu.launches import CardServing, served
from tests.npu.parts.plain import Reference, reference
from tests.npu.rig import Rig, Skipped
from tests.waiting import wait_for

KNOWN_S = 10.0
KV_NOISE = 0.02  # where the KV cache is what profiling leaves, it is not the same to the block
MOST_LOST_BYTES = 1 << 30  # what a device may show less of free memory after a restart: its driver's own


def run(rig: Rig) -> None:
    if (right := reference(rig)) is None:
        raise Skipped("part plain has left no answers to compare with")
    shared = "E=0.3,P=0.7" if rig.card.kind == "npu" else ""
    with served(rig, "(E-P)-D", core_share=shared) as launch:
        for killed in ("E0", "P0"):
            _kill(launch, killed, right)
        _without_an_encoder(launch, right)


def _kill(launch: CardServing, killed: str, right: Reference) -> None:
    """Kill it; the other stages live on, and it comes back with the memory and the cores that it had."""
    rig, card = launch.rig, launch.rig.card
    before, free = launch.instances(), _free_bytes(card)
    _kill_and_wait(launch, killed)
    wait_for(
        lambda: launch.instances()[killed]["incarnation"] != before[killed]["incarnation"] and launch.healthy(),
        f"{killed} to be back",
        card.start_s,
    )
    after = launch.instances()
    others = [name for name in before if after[name]["incarnation"] != before[name]["incarnation"]]
    rig.check(others == [killed], f"only {killed} is restarted", str(others))
    wait_for(lambda: launch.instances()[killed]["stage"] is not None, f"{killed} to report", KNOWN_S)
    had, has = (told[killed]["stage"]["kv_tokens"] for told in (before, launch.instances()))
    rig.check(abs(has - had) <= KV_NOISE * had, f"{killed} has its KV cache back", f"{has} tokens, {had} before")
    cores = {name: one["cores"] for name, one in launch.instances().items()}
    rig.check(cores == {name: one["cores"] for name, one in before.items()}, f"{killed} has its cores back", str(cores))
    if card.kind != "cpu" and free is not None and (now := _free_bytes(card)) is not None:
        rig.row("free_bytes_before_and_after", [free, now], killed=killed)
        rig.check(now >= free - MOST_LOST_BYTES, f"{killed} has left no memory behind")
    shape = PAIRWISE_DIFFERENT[8]  # shown before, in another size: this feature is nowhere yet
    answered(launch, about(DemoPrompt(shape.shapes, 273 + ord(killed[0]), shape.answer)))
    _same(launch, right, 0)


def _without_an_encoder(launch: CardServing, right: Reference) -> None:
    """While it is away pictures are answered all the same."""
    _kill_and_wait(launch, "E0")
    _same(launch, right, 3)
    wait_for(launch.healthy, "E0 to be back", launch.rig.card.start_s)


def _kill_and_wait(launch: CardServing, killed: str) -> None:
    launch.signal_stage(killed, signal.SIGKILL)
    wait_for(lambda: not launch.instances()[killed]["up"], "the proxy to know", KNOWN_S)


def _same(launch: CardServing, right: Reference, number: int) -> None:
    ours, theirs = answered(launch, about(PAIRWISE_DIFFERENT[number]))[0], right.together[number]
    same = is_near_tie(ours, theirs, right.near_tie)
    launch.rig.check(same, f"picture {number} has its answer", difference(ours, theirs))


def _free_bytes(card: Card) -> int | None:
    """Free memory of all devices under test together, as the vendor's tool says."""
    found = [one.free_bytes for one in read_properties(discover(card.kind)) if one.index in card.ids]
    return None if None in found or not found else sum(bytes_ or 0 for bytes_ in found)
