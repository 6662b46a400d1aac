"""What an observer makes of what stages and front doors say: sizes of requests, group-seconds, work that waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from deploy.follow.observe import KEPT, WARM_S, Observer, Seen
from deploy.follow.types import Observation
from deploy.planner.profile import DeviceProfile
from epd_serve.layout_parser import parse
from epd_serve.roles import Role
from epd_serve.sim.profile import Capacity, Line, Profile
from proxy.records.counts import KindCounts

ENCODE_S, PREFILL_S, STEP_S, BATCH = 0.5, 0.2, 0.1, 4
STAGE = Profile(
    encode=Line(ENCODE_S), prefill=Line(PREFILL_S), decode_step_s=((1.0, STEP_S),), capacity=Capacity(max_running=BATCH)
)
PROFILE = DeviceProfile("model", "device", {1: STAGE})
"""An item, a prompt, a step take so long, whatever their sizes."""
MEDIA = KindCounts(10, 10, 20, 4000, 5000, 10, 10, 410)
"""Ten requests: two items of 200 tokens each, 500 of prompt, 41 of answer."""
TEXT = KindCounts(10, 10, 0, 0, 1000, 10, 10, 210)


@dataclass
class Report:
    waiting: int = 0
    running: int = 0
    pending_prompt_tokens: int = 0
    pending_item_tokens: int = 0
    prompt_tokens_per_s: float = 0.0
    item_tokens_per_s: float = 0.0


def observed(
    observer: Observer, layout: str, came: Mapping[str, KindCounts], *seen: Seen, at_s: float = 10.0
) -> Observation:
    return observer(at_s, parse(layout), seen, came, 10.0, start_s=4.0)


def test_the_profile_says_what_a_request_takes_of_each_group() -> None:
    costs = observed(Observer(PROFILE, None), "E-P-D", {"media": MEDIA, "text": TEXT}).costs
    assert costs["media"] == pytest.approx({"E": 2 * ENCODE_S, "P": PREFILL_S, "D": 40 * STEP_S / BATCH})
    assert costs["text"] == pytest.approx({"E": 0.0, "P": PREFILL_S, "D": 20 * STEP_S / BATCH})


def test_without_encoders_whoever_prefills_encodes() -> None:
    costs = observed(Observer(PROFILE, None), "P-D", {"media": MEDIA}).costs
    assert costs["media"]["P"] == pytest.approx(2 * ENCODE_S + PREFILL_S)


def test_groups_share_a_kind_of_work_by_their_copies() -> None:
    costs = observed(Observer(PROFILE, None), "3P-PD-D", {"text": TEXT}).costs
    assert costs["text"]["P"] == pytest.approx(PREFILL_S * 3 / 4)
    assert costs["text"]["PD"] == pytest.approx(PREFILL_S / 4 + 20 * STEP_S / BATCH / 2)


def test_stages_that_are_warm_know_better_than_the_profile() -> None:
    observer = Observer(PROFILE, None)
    cold = Seen(Role.P, "P", WARM_S / 2, Report(prompt_tokens_per_s=1.0))
    assert observed(observer, "E-P-D", {"text": TEXT}, cold).costs["text"]["P"] == pytest.approx(PREFILL_S)
    warm = [Seen(Role.P, "P", 2 * WARM_S, Report(prompt_tokens_per_s=rate)) for rate in (90.0, 100.0, 1000.0)]
    assert observed(observer, "E-P-D", {"text": TEXT}, *warm).costs["text"]["P"] == pytest.approx(100 / 100.0)
    assert observed(observer, "E-P-D", {"text": TEXT}).costs["text"]["P"] == pytest.approx(1.0), "it is remembered"


def test_without_a_profile_what_was_never_measured_costs_nothing_yet() -> None:
    observer = Observer(None, 0.2)
    assert observed(observer, "E-P-D", {"text": TEXT}).costs["text"] == {"E": 0.0, "P": 0.0, "D": 0.0}
    half_full = Seen(Role.D, "D", 2 * WARM_S, Report(running=2), token_s=0.1, full=0.5)
    costs = observed(observer, "E-P-D", {"text": TEXT}, half_full).costs
    assert costs["text"]["D"] == pytest.approx(20 * 0.1 / 4), "two fill half of it, so four fit"
    reserved = Seen(Role.D, "D", 2 * WARM_S, Report(waiting=2), token_s=0.1, full=0.5)
    costs = observed(observer, "E-P-D", {"text": TEXT}, reserved).costs
    assert costs["text"]["D"] == pytest.approx(20 * 0.1 / 4), "KV that waits for its prompts measures nothing"


def test_sizes_are_those_of_the_last_windows() -> None:
    observer = Observer(PROFILE, None)
    short, long = KindCounts(1, 1, 0, 0, 10, 1, 1, 11), KindCounts(1, 1, 0, 0, 10, 1, 1, 101)
    observed(observer, "P-D", {"text": short})
    both = observed(observer, "P-D", {"text": long}).costs["text"]["D"]
    tokens = (KEPT * 11 + 101) / (KEPT + 1) - 1
    assert both == pytest.approx(tokens * STEP_S / BATCH)
    for _ in range(100):
        last = observed(observer, "P-D", {"text": long}).costs["text"]["D"]
    assert last == pytest.approx(100 * STEP_S / BATCH, rel=0.01)
    silent = observed(observer, "P-D", {"text": KindCounts()})
    assert silent.costs["text"]["D"] == pytest.approx(last) and silent.came == {"text": 0}


def test_many_requests_at_once_say_alone_what_they_are_like() -> None:
    """A burst of images is more images in each, at once."""
    observer = Observer(PROFILE, None)
    before = observed(observer, "E-P-D", {"media": KindCounts(100, 100, 100, 20_000, 30_000, 100, 100, 410)})
    burst = observed(observer, "E-P-D", {"media": KindCounts(100, 100, 400, 80_000, 90_000, 100, 100, 410)})
    assert burst.costs["media"]["E"] == pytest.approx(4 * before.costs["media"]["E"])


def test_a_group_is_as_many_times_slower_than_the_profile_for_all_kinds() -> None:
    """One rate is measured for both, of which one takes longer for each token."""
    observer, seconds = Observer(PROFILE, None), (10 + 10) * PREFILL_S
    rate = (MEDIA.prompt_tokens + TEXT.prompt_tokens) / seconds
    observed(observer, "E-P-D", {"media": MEDIA, "text": TEXT})
    for slower in (1.0, 2.0):
        warm = Seen(Role.P, "P", 2 * WARM_S, Report(prompt_tokens_per_s=rate / slower))
        costs = observed(observer, "E-P-D", {"media": MEDIA, "text": TEXT}, warm).costs
        assert costs["text"]["P"] == pytest.approx(slower * PREFILL_S)
        assert costs["media"]["P"] == pytest.approx(slower * PREFILL_S)


def test_who_decodes_holds_the_kv_of_a_prompt_from_its_reservation_on() -> None:
    small = Profile(
        prefill=Line(PREFILL_S), decode_step_s=((1.0, STEP_S),), capacity=Capacity(max_running=BATCH, kv_tokens=242)
    )
    costs = observed(Observer(DeviceProfile("model", "device", {1: small}), 1.0), "P-D", {"text": TEXT}).costs
    assert costs["text"]["D"] == pytest.approx((PREFILL_S + 20 * STEP_S) / 2), "the KV of two fits"


def test_work_that_waits_counts_in_seconds_of_its_group() -> None:
    waits = (
        Seen(Role.E, "E", 60.0, Report(pending_item_tokens=800)),
        Seen(Role.P, "P", 60.0, Report(pending_prompt_tokens=1000)),
        Seen(Role.P, "P", 60.0, Report(pending_prompt_tokens=500)),
        Seen(Role.D, "D", 60.0, Report(waiting=3, running=4)),
        Seen(Role.D, "D", 1.0, None),
    )
    backlog = observed(Observer(PROFILE, None), "E-2P-2D", {"media": MEDIA}, *waits).backlog
    assert backlog == pytest.approx({"E": 4 * ENCODE_S, "P": 3 * PREFILL_S, "D": 3 * 40 * STEP_S / BATCH})


def test_who_has_left_the_layout_and_drains_adds_nothing() -> None:
    gone = Seen(Role.E, "E", 60.0, Report(pending_item_tokens=800))
    assert "E" not in observed(Observer(PROFILE, None), "P-D", {"media": MEDIA}, gone).backlog


def test_before_anything_came_nothing_is_needed() -> None:
    seen = observed(Observer(PROFILE, 0.2), "E-P-D", {"text": KindCounts(), "media": KindCounts()})
    assert set(seen.costs) == {"text", "media"} and not any(seen.backlog.values())
    assert all(value < 1 for costs in seen.costs.values() for value in costs.values())
