"""Layouts on the card: tokens as the plain vLLM's, features from the encoder, KV that arrives whole, and its times."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count, pairwise
from typing import Any

import numpy as np
from PIL import Image

from bench.micro.pd.transfers import Transfer, arrived, transfer_of_requests
from deploy.options.mooncake import reads_device_memory
from epd_serve.engine.kv.checksum_audit import CHECKSUMS_ENV, RECEIVED, SENT
from epd_serve.phases.stamps import Timeline, read_stamps
from tests.e2e.bodies import Body, about, chat, conversation, png, text_of
from tests.e2e.demo_prompts import PAIRWISE_DIFFERENT, DemoPrompt
from tests.e2e.serving import recomputed as recomputed_of
from tests.npu.answers import ONE_AT_A_TIME, TOGETHER, answered, difference, first_difference, is_near_tie
from tests.npu.launches import CardServing, served, stage_events
from tests.npu.parts.plain import Reference, reference
from tests.npu.rig import Rig, Skipped
from tests.waiting import wait_for

EXPLAIN = {"x-epd-explain": "1"}
ROUNDS = 4
SHORT, LONG = 6, 100  # turns of a conversation
REPORT_S = 10.0  # stages report twice a second
DECODED = 96  # tokens per stream; the gaps between them are TPOT
STORM = 4  # requests with a picture of its own each, at any time
PICTURE = 448
STORM_S = 60.0


def pd_shm(rig: Rig) -> None:
    _pd(rig, "shm")


def pd_mooncake(rig: Rig) -> None:
    if why := reads_device_memory(rig.card.kind):
        raise Skipped(why)
    _pd(rig, "mooncake")


def e_pd(rig: Rig) -> None:
    with served(rig, "(E-PD)") as launch:
        same_tokens(launch, reference(rig))
        asked = answered(launch, _fresh(0), EXPLAIN)[1].headers["x-epd-path"]
        rig.check(asked == "E-PD", "pictures go E-PD", asked)
        recomputed, encoded = recomputed_of(launch.settled_counters("PD0")), launch.settled_counters("E0")["encoded"]
        rig.check(
            recomputed == 0 and encoded > 0, "features come from E, none is recomputed", f"{encoded}, {recomputed}"
        )


def e_to_pd(rig: Rig) -> None:
    """The encoder writes features into PD's slab, from card to card."""
    if why := reads_device_memory(rig.card.kind):
        raise Skipped(why)
    if rig.card.kind == "npu" and len(rig.card.ids) < 2:
        raise Skipped("Mooncake cannot connect an NPU with itself: this takes two")
    with served(rig, "E-PD", "--feature-transfer", "device") as launch:
        same_tokens(launch, reference(rig))
        before = launch.settled_counters("PD0")
        asked = [answered(launch, _fresh(number), EXPLAIN)[1].headers for number in range(ROUNDS)]
        after = launch.settled_counters("PD0")
        ended = {
            name: count - before.get(name, 0) for name, count in after.items() if name.startswith(("push", "slab"))
        }
        rig.row("features_card_to_card", ended, asked=ROUNDS)
        rig.check(ended.get("pushed", 0) > 0, "the encoder writes features to the other card", str(after))
        rig.check(
            not after.get("push_failed") and not recomputed_of(after), "none fails, none is recomputed", str(after)
        )
        timeline = Timeline(read_stamps(launch.traces))
        events = [stage_events(timeline, headers["x-epd-request-id"]) for headers in asked]
        ends = [(of.get(("E", "encoded")), of.get(("PD", "feature_pinned"))) for of in events]
        rig.row("encoded_to_device_ms", [round(1e3 * (end - begun), 2) for begun, end in ends if begun and end])


def ep_d(rig: Rig) -> None:
    with served(rig, "(E-P)-D") as launch:
        same_tokens(launch, reference(rig))
        features(launch)
        transfers(launch)


def storm(rig: Rig) -> None:
    with served(rig, "(E-PD)") as launch:
        in_a_storm(launch)


def _pd(rig: Rig, transport: str) -> None:
    os.environ[CHECKSUMS_ENV] = "1"  # of the stages; what it costs is in the times of this part, not in `exposed`'s
    # The rehearsal, too, starts them as a card's are: as programs of their own; its other parts fork them.
    started = ("--stage-template", "never") if transport == "shm" else ()
    with served(rig, "P-D", "--kv-transport", transport, *started) as launch:
        rig.row("kv_link", _link(launch))
        same_tokens(launch, reference(rig))
        transfers(launch)
        checksums(launch)


def same_tokens(launch: CardServing, right: Reference | None) -> None:
    """One at a time, then eight pictures at once; a difference has to be where plain vLLM itself was undecided."""
    rig = launch.rig
    if right is None:
        rig.check(False, "greedy tokens are plain vLLM's", "part plain has left none to compare with")
        return
    for name, body in ONE_AT_A_TIME.items():
        ours, theirs = answered(launch, body)[0], right.alone[name]
        why, near = difference(ours, theirs), is_near_tie(ours, theirs, right.near_tie)
        rig.check(not why or near, f"greedy tokens of {name!r} are plain vLLM's", why)
        if why and near:
            rig.row("equal_up_to_a_near_tie", first_difference(ours, theirs), of=len(theirs), why=why)
    with ThreadPoolExecutor(len(TOGETHER)) as pool:
        ours = list(pool.map(lambda body: answered(launch, body)[0], TOGETHER))
    pairs = list(zip(ours, right.together, strict=True))
    wrong = [difference(one, other) for one, other in pairs if not is_near_tie(one, other, right.near_tie)]
    equal = sum(first_difference(one, other) is None for one, other in pairs)
    rig.row("answers_equal_at_eight_at_a_time", f"{equal} of {len(pairs)}")
    rig.check(not wrong, "eight at a time each get the answer to their own picture", "\n".join(wrong))
    if rig.card.answers_are_known:
        for prompt in PAIRWISE_DIFFERENT[:4]:
            said = text_of(launch.post("/v1/chat/completions", about(prompt)))
            rig.check(said == prompt.answer, f"it sees: {prompt.answer}", said)


def features(launch: CardServing) -> None:
    """They come from E, none is recomputed, and each is at hand before its prompt is computed (EPD-Serve §3.2)."""
    rig = launch.rig
    wait_for(lambda: all(launch.instances()[name]["store"] for name in ("E0", "P0")), "the first reports", REPORT_S)
    encoded, recomputed = launch.counters("E0").get("encoded", 0), launch.recomputed("P0")
    begun_in_part = launch.counters("P0").get("partial_prefills", 0)
    asked = [answered(launch, _fresh(number), EXPLAIN)[1].headers for number in range(ROUNDS)]
    ways = {headers["x-epd-path"] for headers in asked}
    rig.check(ways == {"E-P-D"}, "pictures go E-P-D", str(ways))
    wait_for(lambda: launch.counters("E0").get("encoded", 0) >= encoded + ROUNDS, "E to report its items", REPORT_S)
    rig.check(launch.recomputed("P0") == recomputed, "no feature is recomputed", str(launch.counters("P0")))
    timeline = Timeline(read_stamps(launch.traces))
    events = [stage_events(timeline, headers["x-epd-request-id"]) for headers in asked]
    late = sum(of.get(("P", "feature_pinned"), math.inf) > of["P", "prefill_start"] for of in events)
    in_part = launch.settled_counters("P0").get("partial_prefills", 0) - begun_in_part
    rig.check(late <= in_part, "features are pinned before prefill begins", f"{late} are not, {in_part} began in part")
    for name, begin, end in (
        ("encode_ms", ("E", "encode_start"), ("E", "encoded")),
        ("feature_put_ms", ("E", "encoded"), ("E", "feature_put")),
        ("feature_event_to_pinned_ms", ("P", "feature_event"), ("P", "feature_pinned")),
        ("feature_load_ms", ("P", "feature_loaded_begun"), ("P", "feature_loaded")),
        ("encoded_to_device_ms", ("E", "encoded"), ("P", "feature_loaded")),
    ):
        taken = [1e3 * (of[end] - of[begin]) for of in events if begin in of and end in of]
        rig.row(name, [round(ms, 2) for ms in taken])


def transfers(launch: CardServing) -> None:
    """Every layer of KV arrives, in order, by the way that was asked for; overlap = 1 - exposed / latency."""
    rig = launch.rig
    link = _link(launch)
    rig.check(link["state"] == "up", "the KV link is up", str(link["reason"]))
    for turns in (SHORT, LONG):
        asked = [answered(launch, _picture_first(turns, number), EXPLAIN)[1].headers for number in range(ROUNDS)]
        ids = transfer_of_requests(read_stamps(launch.traces))
        wanted = [ids[headers["x-epd-request-id"]] for headers in asked]
        wait_for(lambda wanted=wanted: len(arrived(read_stamps(launch.traces), wanted)) == ROUNDS, "stamps", REPORT_S)
        found = list(arrived(read_stamps(launch.traces), wanted).values())
        rig.check(
            all(map(_whole, found)), f"all layers of KV arrive, {turns} turns", str([one.packets for one in found])
        )
        for name, values in {
            "kv_bytes": [one.nbytes for one in found],
            "kv_groups_of_layers": [one.groups for one in found],
            "kv_latency_ms": [round(1e3 * one.link_s, 3) for one in found],
            "kv_exposed_ms": [round(1e3 * one.exposed_s, 3) for one in found],
            "kv_overlap": [round(one.overlap, 4) for one in found],
            "kv_gb_per_s": [round(one.bytes_per_s / 1e9, 3) for one in found],
        }.items():
            rig.row(name, values, turns=turns, transport=link["transport"])
    rig.check(_link(launch)["failed"] == 0, "no transfer failed", str(_link(launch)))


def checksums(launch: CardServing) -> None:
    """Every transfer so far, layer by layer: what D has is what P had."""
    stamps = read_stamps(launch.traces)
    sent, received = (
        {(one.subject, one.more["child"]): one.more for one in stamps if one.event == event}
        for event in (SENT, RECEIVED)
    )
    differ = []
    for key, there in received.items():
        here = sent.get(key, {"sums": [], "blocks": 0})
        layers = [at for at, pair in enumerate(zip(here["sums"], there["sums"], strict=False)) if pair[0] != pair[1]]
        if here["sums"] != there["sums"]:
            differ.append(
                f"{key[0]}: layers {layers} of {len(there['sums'])}, blocks {here['blocks']} and {there['blocks']}"
            )
    launch.rig.row("kv_checksums", {"transfers": len(received), "differ": len(differ)})
    launch.rig.check(bool(received) and not differ, "D's KV is P's, by checksum of every layer", "\n".join(differ[:10]))


def in_a_storm(launch: CardServing) -> None:
    """What pictures that nobody has seen do to the pace of a stream. Printed, not judged: that both end is."""
    alone = _arrivals_s(launch)
    with _storm(launch) as answers:
        crowded = _arrivals_s(launch)
    launch.rig.check(answers() > 0, "pictures are answered during the storm")
    for name, times in (("alone", alone), ("in_an_encode_storm", crowded)):
        gaps_ms = [1e3 * (later - earlier) for earlier, later in pairwise(times)]
        longest = round(max(gaps_ms), 2)
        launch.rig.row(f"tpot_ms_{name}", round(_tpot_ms(times), 3), longest_gap_ms=longest)
    ratio = round(_tpot_ms(crowded) / _tpot_ms(alone), 2)
    launch.rig.row("tpot_in_an_encode_storm_over_alone", ratio, pictures=answers())


def _whole(one: Transfer) -> bool:
    """Its packets cover all layers without a gap, step by step."""
    layers = max(packet.last for packet in one.packets)
    joined = all(later.first in (earlier.last, 0) for earlier, later in pairwise(one.packets))
    return one.packets[0].first == 0 and one.packets[-1].last == layers and joined


def _fresh(number: int) -> Body:
    """A picture that nothing else has shown: its feature cannot be anywhere yet."""
    base = PAIRWISE_DIFFERENT[number % len(PAIRWISE_DIFFERENT)]
    return about(DemoPrompt(base.shapes, 257 + number, base.answer, background=base.background))


def _picture_first(turns: int, number: int) -> Body:
    """A conversation that begins with a picture that no other of them has, so that P knows no prefix of it."""
    prompt = PAIRWISE_DIFFERENT[(number + turns) % len(PAIRWISE_DIFFERENT)]
    picture = DemoPrompt(prompt.shapes, 300 + turns + number, prompt.answer).picture()
    body = conversation(turns, png(picture))
    *small_talk, question = body["messages"]
    return {**body, "messages": [question, small_talk[1], *small_talk, {"role": "user", "content": "Hello"}]}


def _link(launch: CardServing) -> dict[str, Any]:
    (link,) = launch.instances()["P0"]["kv_links"]
    return link


def _arrivals_s(launch: CardServing) -> list[float]:
    """When the tokens of one streamed answer came."""
    body = {**chat("Hello", max_tokens=DECODED, ignore_eos=True), "stream": True}
    found = []
    with launch.client.stream("POST", f"{launch.url}/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, response.read()[:500]
        for line in response.iter_lines():
            if line.startswith("data: {") and json.loads(line.removeprefix("data: "))["choices"]:
                found.append(time.monotonic())
    assert len(found) > DECODED / 2, "fewer events than tokens: nothing to measure"
    return found


def _tpot_ms(times: list[float]) -> float:
    """Time per output token, the first one aside; single gaps tell how events bunch on their way, not how fast D is."""
    return 1e3 * (times[-1] - times[0]) / (len(times) - 1)


@contextmanager
def _storm(launch: CardServing) -> Iterator[Callable[[], int]]:
    """`STORM` requests at a time, one token asked of each. Yields how many were answered."""
    over_now, numbers, answers = threading.Event(), count(), list[int]()
    until = time.monotonic() + STORM_S

    def keep_asking() -> None:
        while not over_now.is_set() and time.monotonic() < until:
            body = chat("What is in the picture?", _noise(next(numbers)), max_tokens=1)
            if launch.post("/v1/chat/completions", body).status_code == 200:
                answers.append(1)

    with ThreadPoolExecutor(STORM) as pool:
        asking = [pool.submit(keep_asking) for _ in range(STORM)]
        try:
            yield lambda: len(answers)
        finally:
            over_now.set()
        for one in asking:
            one.result(timeout=STORM_S)


def _noise(seed: int) -> bytes:
    """A picture of random pixels: no two are equal, so none is known."""
    pixels = np.random.default_rng(seed).integers(0, 256, (PICTURE, PICTURE, 3), dtype=np.uint8)
    return png(Image.fromarray(pixels))
