"""What follows a failed attempt, row by row of the table: who is tried again, in which way, and what is the end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_serve.errors import StageError
from epd_serve.wire import FeatureMissing
from proxy.config.settings import ProxySettings
from proxy.context import Delivery, RequestContext
from proxy.errors import StageDied, StageFault, StageRefusal, StageTimeout, StageUnreachable
from proxy.generate.recovery import Failure, Next, next_step
from proxy.request.parse import Endpoint, ParsedRequest
from tests.proxy.fakes import context, settings, text_body

LOST = FeatureMissing("r", ["key"], "evicted")
DIED = StageDied("P0 broke its connection", stage="P0")
FAULT = StageFault("500: boom", stage="P0")
GONE = StageUnreachable("P0 cannot be reached", stage="P0")
SLOW = StageTimeout("P0 took longer than 1 s", stage="P0")
REFUSAL = StageRefusal("no", status=400, error_type="invalid_request_error", param=None, code=None)
REENCODE = settings(on_missing_feature="reencode")
FEATURES = {"delivery": Delivery.FEATURES}
METADATA = {"delivery": Delivery.METADATA}


def ctx(**state: Any) -> RequestContext:
    body = text_body(stream=True)
    one = context(ParsedRequest(Endpoint.CHAT, body, body["model"], True, (), None))
    for name in ("migrations", "finished"):
        setattr(one.history, name, state.pop(name, getattr(one.history, name)))
    for name, value in state.items():
        setattr(one, name, value)
    return one


def failed(error: StageError | StageRefusal, **more: Any) -> Failure:
    return Failure(**{"error": error, "delivery": Delivery.PIXELS, "at": 100.0, **more})


@pytest.mark.parametrize(
    ("failure", "state", "config", "then"),
    [
        # The client has had something.
        (failed(DIED, repeatable=False), {}, {}, Next.GIVE_UP),
        (failed(DIED, told=True), {}, {}, Next.GO_ON),
        (failed(DIED, told=True), {"failures": 9}, {}, Next.GO_ON),
        (failed(DIED, told=True), {"finished": True}, {}, Next.END),
        (failed(DIED, told=True), {"migrations": 3}, {}, Next.GIVE_UP),
        (failed(REFUSAL, told=True, **METADATA), {}, {}, Next.GIVE_UP),
        # It is about the body.
        (failed(FAULT, alike=True), {}, {}, Next.BLAME),
        (failed(REFUSAL), {}, {}, Next.GIVE_UP),
        (failed(REFUSAL, **FEATURES), {}, {}, Next.GIVE_UP),
        (failed(REFUSAL, **METADATA), {}, {}, Next.SEND_PIXELS),
        (failed(REFUSAL, **METADATA), {}, {"on_missing_feature": "reencode"}, Next.SEND_PIXELS),
        # A feature got lost.
        (failed(FAULT, missing=LOST, **FEATURES), {}, {}, Next.SEND_PIXELS),
        (failed(FAULT, missing=LOST, **METADATA), {}, {"on_missing_feature": "reencode"}, Next.ENCODE_AGAIN),
        (
            failed(FAULT, missing=LOST, **METADATA),
            {"encoded_again": 1},
            {"on_missing_feature": "reencode"},
            Next.SEND_PIXELS,
        ),
        (failed(FAULT, missing=LOST, went_ahead=True, **METADATA), {}, {}, Next.REPEAT),
        (failed(DIED, **METADATA), {}, {}, Next.RETRY),
        (failed(DIED, **METADATA), {"doubted": True}, {}, Next.SEND_PIXELS),
        (failed(DIED, **METADATA), {"doubted": True}, {"on_missing_feature": "reencode"}, Next.SEND_PIXELS),
        (failed(DIED, listening=False, **METADATA), {}, {"on_missing_feature": "reencode"}, Next.ENCODE_AGAIN),
        (failed(SLOW, listening=False, **METADATA), {}, {}, Next.ELSEWHERE),
        (failed(GONE, listening=False, **METADATA), {}, {}, Next.PROBE),
        # An instance failed.
        (failed(DIED), {"failures": 1}, {}, Next.RETRY),
        (failed(DIED), {"failures": 2}, {}, Next.GIVE_UP),
        (failed(DIED, shared_death=True), {"failures": 2}, {}, Next.RETRY),
        (failed(DIED), {}, {"retries": 0}, Next.GIVE_UP),
        (failed(DIED, shared_death=True), {}, {"retries": 0}, Next.GIVE_UP),
        (failed(SLOW), {}, {}, Next.ELSEWHERE),
        (failed(GONE), {"failures": 9}, {"retries": 0}, Next.PROBE),
        (failed(GONE), {"probing_until": 100.5}, {}, Next.PROBE),
        (failed(GONE), {"probing_until": 99.5}, {}, Next.GIVE_UP),
    ],
)
def test_each_failure_is_followed_by_what_the_table_says(
    failure: Failure, state: dict[str, Any], config: dict[str, Any], then: Next
) -> None:
    assert next_step(failure, ctx(**state), settings(**config)) is then


@given(
    st.sampled_from([DIED, FAULT, GONE, SLOW, REFUSAL]),
    st.sampled_from(list(Delivery)),
    st.sampled_from([settings(), REENCODE, settings(send_pixels="never")]),
    st.fixed_dictionaries(
        {name: st.booleans() for name in ("repeatable", "told", "shared_death", "listening", "went_ahead")}
    ),
    st.sampled_from([None, LOST]),
)
def test_a_request_that_fails_in_the_same_way_for_ever_comes_to_an_end(
    error: StageError | StageRefusal,
    delivery: Delivery,
    config: ProxySettings,
    facts: dict[str, bool],
    missing: FeatureMissing | None,
) -> None:
    """Played as the loop does, whoever fails: what is uncounted happens a bounded number of times."""
    one, at = ctx(), 0.0
    shared_deaths = 8 if facts["shared_death"] else 0  # then the count of deaths ends it
    for _ in range(40):
        failure = Failure(error, delivery, at, missing=missing, **facts)
        if not failure.may_lack_features:
            failure = Failure(error, delivery, at, **facts)
        if facts["shared_death"] and not shared_deaths:
            return
        match next_step(failure, one, config):
            case Next.GIVE_UP | Next.BLAME | Next.END:
                return
            case Next.GO_ON:
                one.history.migrations += 1
            case Next.REPEAT:
                facts["went_ahead"] = False
            case Next.ENCODE_AGAIN:
                assert one.encoded_again < (1 if config.stages_encode else config.retries)
                one.encoded_again += 1
            case Next.SEND_PIXELS:
                assert config.stages_encode and delivery is not Delivery.PIXELS
                delivery = Delivery.PIXELS
            case Next.PROBE:
                one.probing_until = one.probing_until or at + config.timeouts.instance_wait_s
                at += 0.1
            case Next.ELSEWHERE | Next.RETRY:
                one.doubted = one.doubted or failure.may_lack_features
                one.failures += not failure.shared_death
                shared_deaths -= facts["shared_death"]
    raise AssertionError("it goes on for ever")
