"""Features and KV take the way that the layout says, and how much of the way hides behind computation."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from bench.stamps import Timeline, read_stamps
from bench.transfer_pd_stamps import arrived, transfer_of_requests
from tests.e2e.bodies import Body, about, conversation, png
from tests.e2e.demo_prompts import PAIRWISE_DIFFERENT, DemoPrompt
from tests.e2e.serving import wait_until
from tests.npu.card import Card
from tests.npu.report import Report
from tests.npu.stages.answers import answered
from tests.npu.stages.launches import SPLIT, CardServing, over

EXPLAIN = {"x-epd-explain": "1"}
STAMPS_S = 10.0
ROUNDS = 4
REPORT_S = 10.0  # stages report twice a second


def fresh(number: int) -> Body:
    """A picture that no other test has shown: its feature cannot be anywhere yet."""
    base = PAIRWISE_DIFFERENT[number % len(PAIRWISE_DIFFERENT)]
    return about(DemoPrompt(base.shapes, 257 + number, base.answer, background=base.background))


def picture_first(turns: int, number: int) -> Body:
    """A conversation that begins with a picture that no other of them has, so that P knows no prefix of it."""
    prompt = PAIRWISE_DIFFERENT[(number + turns) % len(PAIRWISE_DIFFERENT)]
    picture = DemoPrompt(prompt.shapes, 300 + turns + number, prompt.answer).picture()
    body = conversation(turns, png(picture))
    *small_talk, question = body["messages"]
    return {**body, "messages": [question, small_talk[1], *small_talk, {"role": "user", "content": "Hello"}]}


def expected_transport(launch: CardServing, card: Card) -> str:
    """`auto`: between NPUs Mooncake, in shared memory where P and D are on one NPU and on all other devices."""
    same = set(launch.devices_of("P0")) & set(launch.devices_of("D0"))
    return "mooncake" if card.kind == "npu" and not same else "shm"


@over("(E-PD)", "(E-PD), core shares", *SPLIT)
def test_features_come_from_the_encoder_and_are_not_recomputed(launch: CardServing, report: Report) -> None:
    head = "P0" if "P0" in launch.instances() else "PD0"
    wait_until(lambda: all(launch.instances()[name]["store"] for name in ("E0", head)), REPORT_S, "the first reports")
    encoded, recomputed = launch.counters("E0").get("encoded", 0), launch.recomputed(head)
    ways = {answered(launch, fresh(number), EXPLAIN)[1].headers["x-epd-path"] for number in range(ROUNDS)}
    assert ways == {"E-P-D" if head == "P0" else "E-PD"}
    wait_until(lambda: launch.counters("E0").get("encoded", 0) >= encoded + ROUNDS, REPORT_S, "E to report its items")
    assert launch.recomputed(head) == recomputed
    report.figure("store_counters", launch.counters(head), launch=launch.name)


@over("(E-PD)", "(E-PD), core shares", *SPLIT)
def test_a_feature_is_at_hand_before_its_prompt_is_computed(launch: CardServing, report: Report) -> None:
    """Prefetched by its announcement, while E still answers (EPD-Serve §3.2); how early is printed."""
    asked = [answered(launch, fresh(10 + number), EXPLAIN)[1].headers["x-epd-request-id"] for number in range(ROUNDS)]
    timeline = Timeline(read_stamps(launch.traces))
    events = [timeline.of(request) for request in asked]
    assert all("feature_pinned" in of for of in events), [sorted(of) for of in events]
    assert all(of["feature_pinned"] <= of["prefill_start"] for of in events if "prefill_start" in of)
    for name, begin, end in (
        ("encode_ms", "encode_start", "encoded"),
        ("feature_put_ms", "encoded", "feature_put"),
        ("feature_event_to_pinned_ms", "feature_event", "feature_pinned"),
        ("feature_pinned_before_dispatch_ms", "feature_pinned", "dispatched"),
    ):
        taken = [1e3 * (of[end] - of[begin]) for of in events if begin in of and end in of]
        report.figure(name, [round(ms, 2) for ms in taken], launch=launch.name)


@over(*SPLIT)
def test_kv_travels_as_expected(launch: CardServing, card: Card) -> None:
    link = _link(launch)
    assert link["state"] == "up", link["reason"]
    assert link["transport"] == expected_transport(launch, card), link
    before = link["transfers"]
    answered(launch, conversation(6))
    wait_until(lambda: _link(launch)["transfers"] > before, REPORT_S, "P to report its transfer")
    assert _link(launch)["failed"] == 0


@over(*SPLIT)
@pytest.mark.parametrize("turns", [6, 100], ids=["a short prompt", "a long prompt"])
def test_every_transfer_arrives_whole_and_its_overlap_is_printed(
    launch: CardServing, report: Report, turns: int
) -> None:
    """overlap = 1 - exposed / KV latency, exposed = max(0, DONE - end of prefill). Printed: a card decides, not we."""
    asked = [
        answered(launch, picture_first(turns, number), EXPLAIN)[1].headers["x-epd-request-id"]
        for number in range(ROUNDS)
    ]
    stamps = read_stamps(launch.traces)
    ids = transfer_of_requests(stamps)
    wanted = [ids[request] for request in asked]
    wait_until(lambda: len(arrived(read_stamps(launch.traces), wanted)) == ROUNDS, STAMPS_S, "the stamps of all")
    transfers = list(arrived(read_stamps(launch.traces), wanted).values())
    layers = {max(packet.last for packet in one.packets) for one in transfers}
    for one in transfers:
        assert one.packets[0].first == 0
        assert {packet.last for packet in one.packets} >= layers
        cuts = pairwise(one.packets)
        assert all(later.first in (earlier.last, 0) for earlier, later in cuts), one.packets
    size = "short" if turns == 6 else "long"
    for name, values in {
        "kv_bytes": [one.nbytes for one in transfers],
        "kv_groups_of_layers": [one.groups for one in transfers],
        "kv_latency_ms": [round(1e3 * one.link_s, 3) for one in transfers],
        "kv_exposed_ms": [round(1e3 * one.exposed_s, 3) for one in transfers],
        "kv_overlap": [round(one.overlap, 4) for one in transfers],
        "kv_gb_per_s": [round(one.bytes_per_s / 1e9, 3) for one in transfers],
    }.items():
        report.figure(f"{name}, {size} prompt", values, launch=launch.name)


def _link(launch: CardServing) -> dict[str, Any]:
    (link,) = launch.instances()["P0"]["kv_links"]
    return link
