"""kill -9 of a stage beside another one on its device: the neighbour lives, what was killed gets its part back."""

from __future__ import annotations

import signal

from npu_ops.discovery import discover
from npu_ops.properties import read_properties
from tests.e2e.bodies import about
from tests.e2e.demo_prompts import PAIRWISE_DIFFERENT, DemoPrompt
from tests.e2e.serving import wait_until
from tests.npu.card import Card
from tests.npu.report import Report
from tests.npu.stages.answers import answered, difference, is_near_tie
from tests.npu.stages.conftest import Reference
from tests.npu.stages.launches import CardServing, over
from tests.npu.stages.test_core_shares import granted

PAIR = "(E-P-D)", "(E-P)-D, core shares"
KNOWN_S = 10.0
KV_NOISE = 0.02  # where the KV cache is what profiling leaves, it is not the same to the block
MOST_LOST_BYTES = 1 << 30  # what a device may show less of free memory after a restart: its driver's own


def kill(launch: CardServing, killed: str, card: Card, reference: Reference, report: Report) -> None:
    """Kill it; the other stages live on, and it comes back with the memory and the cores that it had."""
    before, shares, free = launch.instances(), granted(launch), free_bytes(card)
    launch.signal_stage(killed, signal.SIGKILL)
    wait_until(lambda: not launch.instances()[killed]["up"], KNOWN_S, "the proxy to know")
    wait_until(
        lambda: launch.instances()[killed]["incarnation"] != before[killed]["incarnation"] and launch.healthy(),
        card.start_s,
        f"{killed} to be back",
    )
    after = launch.instances()
    for name in set(before) - {killed}:
        assert after[name]["incarnation"] == before[name]["incarnation"], f"{name} was restarted too"
    wait_until(lambda: launch.instances()[killed]["stage"] is not None, KNOWN_S, f"{killed} to report")
    had, has = (told[killed]["stage"]["kv_tokens"] for told in (before, launch.instances()))
    assert abs(has - had) <= KV_NOISE * had, f"{has} tokens of KV cache, {had} before"
    assert granted(launch) == shares
    if card.kind != "cpu" and free is not None and (now := free_bytes(card)) is not None:
        report.figure("free_bytes_before_and_after", [free, now], launch=f"{launch.name}, {killed} killed")
        assert now >= free - MOST_LOST_BYTES
    shape = PAIRWISE_DIFFERENT[8]  # shown before, in another size: this feature is nowhere yet
    body = about(DemoPrompt(shape.shapes, 273 + ord(killed[0]), shape.answer))
    assert answered(launch, body)[0]
    ours, right = answered(launch, about(PAIRWISE_DIFFERENT[0]))[0], reference.together[0]
    assert is_near_tie(ours, right, reference.near_tie), difference(ours, right)


def free_bytes(card: Card) -> int | None:
    """Free memory of all devices under test together, as the vendor's tool says."""
    found = [one.free_bytes for one in read_properties(discover(card.kind)) if one.index in card.ids]
    return None if None in found or not found else sum(bytes_ or 0 for bytes_ in found)


@over(*PAIR)
def test_an_encoder_is_killed_and_prefill_beside_it_lives(
    launch: CardServing, card: Card, reference: Reference, report: Report
) -> None:
    kill(launch, "E0", card, reference, report)


@over(*PAIR)
def test_prefill_is_killed_and_the_encoder_beside_it_lives(
    launch: CardServing, card: Card, reference: Reference, report: Report
) -> None:
    kill(launch, "P0", card, reference, report)


@over(*PAIR)
def test_while_an_encoder_is_away_pictures_are_answered_all_the_same(
    launch: CardServing, card: Card, reference: Reference
) -> None:
    launch.signal_stage("E0", signal.SIGKILL)
    wait_until(lambda: not launch.instances()["E0"]["up"], KNOWN_S, "the proxy to know")
    ours, right = answered(launch, about(PAIRWISE_DIFFERENT[3]))[0], reference.together[3]
    assert is_near_tie(ours, right, reference.near_tie), difference(ours, right)
    wait_until(launch.healthy, card.start_s, "E0 to be back")
