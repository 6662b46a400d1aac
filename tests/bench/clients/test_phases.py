"""The join of stamps to phases: on stamps of real runs (`stamps`), and on made ones of what those lack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.clients.phases import durations, exposed, joined, spans_of
from bench.clients.results import RequestRecord
from epd_serve.phases.phase import Phase
from epd_serve.phases.stamps import Stamp, Timeline, read_stamps
from tests.bench.clients.made import failed, row

RUNS = Path(__file__).with_name("stamps")
KINDS = ("new image", "repeated image", "text")
FRONT = {Phase.CLIENT, Phase.HTTP_CLIENT, Phase.PROXY, Phase.PROXY_QUEUE}
OF_P = {Phase.HTTP_P, Phase.PREPROCESS_P, Phase.PREFILL_QUEUE, Phase.PREFILL}
OF_D = {Phase.PD, Phase.HTTP_D, Phase.PREPROCESS_D, Phase.DECODE_QUEUE, Phase.FIRST_TOKEN, Phase.ANSWER_D, Phase.DECODE}
OF_E = {
    Phase.HTTP_E,
    Phase.DECODE_MEDIA,
    Phase.PREPROCESS_E,
    Phase.ENCODE_QUEUE,
    Phase.ENCODE,
    Phase.ANSWER_E,
    Phase.EP,
}


def recorded(layout: str, kind: str) -> tuple[RequestRecord, list[Stamp]]:
    """A request alone on real stages (CPU, demo model), with its stamps."""
    records = msgspec.json.decode((RUNS / layout / "requests.json").read_bytes(), type=list[RequestRecord])
    (record,) = (one for one in records if one.spec == kind)
    return record, Timeline(read_stamps(RUNS / layout)).named(record.id)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["(E-P)-D", "TP1"])
def test_exposed_times_of_real_stages_add_up_to_the_request(layout: str, kind: str):
    record, stamps = recorded(layout, kind)
    spans = spans_of(stamps, record)

    assert sum(exposed(spans).values()) == pytest.approx(record.e2e_s, rel=0.02)
    before = sum(taken for phase, taken in exposed(spans).items() if phase is not Phase.DECODE)
    assert before == pytest.approx(record.ttft_s, rel=0.02)
    assert all(alone <= durations(spans)[phase] + 1e-9 for phase, alone in exposed(spans).items())


@pytest.mark.parametrize("kind", KINDS)
def test_in_a_monolith_nothing_overlaps_and_durations_add_up_themselves(kind: str):
    record, stamps = recorded("TP1", kind)

    assert sum(durations(spans_of(stamps, record)).values()) == pytest.approx(record.e2e_s, rel=0.02)


@pytest.mark.parametrize(
    ("kind", "phases"),
    [
        ("new image", FRONT | OF_E | {Phase.EP} | OF_P | OF_D),
        ("repeated image", FRONT | {Phase.ENCODE_QUEUE, Phase.EP} | OF_P | OF_D),
        ("text", FRONT | OF_P | OF_D),
    ],
)
def test_a_request_has_the_phases_that_it_passes_and_no_other(kind: str, phases: set[Phase]):
    record, stamps = recorded("(E-P)-D", kind)

    assert durations(spans_of(stamps, record)).keys() == phases


def test_a_repeated_image_waits_for_its_stages_front_ends_not_for_its_feature():
    """The feature is pinned once its request is there: what came before it is preprocessing."""
    record, stamps = recorded("(E-P)-D", "repeated image")
    taken = durations(spans_of(stamps, record))

    assert taken[Phase.EP] < taken[Phase.PREPROCESS_P]
    (asked,) = (stamp.t for stamp in stamps if (stamp.instance, stamp.event) == ("P0", "handed_over"))
    (loaded,) = (stamp for stamp in stamps if stamp.event == "feature_pinned")
    copies = [stamp for stamp in stamps if stamp.event == "feature_loaded"]
    copied_s = sum(stamp.t - stamp.more["t0"] for stamp in copies)
    assert taken[Phase.EP] == pytest.approx(max(0.0, loaded.t - asked) + copied_s, abs=1e-3)


def test_a_stamp_that_lacks_leaves_its_time_to_nobody():
    record, stamps = recorded("(E-P)-D", "new image")
    fewer = [stamp for stamp in stamps if (stamp.instance, stamp.event) != ("E0", "received")]
    whole, without = joined(record, Timeline(stamps)), joined(record, Timeline(fewer))

    assert whole is not None and without is not None
    assert whole["sum_error"] < 0.02 < without["sum_error"]


# --- made ones ----------------------------------------------------------------------------------------------------


def made(*events: tuple[float, str, str], **more: dict[str, Any]) -> list[Stamp]:
    """(ms after 10 s, instance, event) of the request `r`, which its client calls x-3. `more`: by event."""
    found = [(2.0, "proxy", "arrived"), (2.5, "proxy", "received"), *events, (200.0, "proxy", "done")]
    more = {"arrived": {"client_id": "x-3"}, **more}
    return sorted(
        (Stamp(10 + ms / 1e3, instance, "r", event, more.get(event, {})) for ms, instance, event in found),
        key=lambda stamp: stamp.t,
    )


def taken_ms(stamps: Sequence[Stamp], **more: Any) -> dict[str, float]:
    found = joined(row(3, 10.0, ttft=0.1, sent_s=10.001, **more), Timeline(stamps))
    assert found is not None
    taken: dict[str, float] = found["phases_ms"]
    return taken


def test_stages_that_stamp_nothing_are_one_piece():
    stamps = made(
        (20, "proxy", "encode_sent"), (40, "proxy", "encode_done"),
        (50, "proxy", "dispatched"), (90, "proxy", "first_byte"),
        encode_sent={"to": "E0"}, encode_done={"by": "E0"},
    )  # fmt: skip

    assert taken_ms(stamps)["stages, not told apart"] == pytest.approx(20 + 40)


def test_what_was_downloaded_is_not_the_proxys_own_work():
    stamps = made((30, "proxy", "downloaded"), (40, "proxy", "dispatched"), downloaded={"t0": 10.01})

    assert taken_ms(stamps) == pytest.approx({**taken_ms(stamps), "download": 20.0, "proxy": 17.5})


def test_a_wait_to_be_admitted_is_a_queue():
    stamps = made((70, "proxy", "admitted"), (75, "proxy", "dispatched"), admitted={"t0": 10.010})
    taken = taken_ms(stamps)

    assert (taken["proxy queue"], taken["proxy"]) == pytest.approx((60.0, 12.5))


def test_of_several_attempts_the_last_one_counts():
    stamps = made(
        (10, "proxy", "dispatched"), (12, "PD0", "received"), (15, "PD0", "queued"), (16, "PD0", "scheduled"),
        (40, "proxy", "dispatched"), (45, "PD1", "received"), (50, "PD1", "queued"), (60, "PD1", "scheduled"),
        (80, "PD1", "computed"), (85, "PD1", "answering"), (90, "proxy", "first_byte"),
    )  # fmt: skip
    taken = taken_ms(stamps)

    assert taken["failed attempts"] == pytest.approx(30.0)
    assert (taken["preprocess P"], taken["prefill queue"], taken["prefill"]) == pytest.approx((5.0, 10.0, 20.0))
    assert (taken["answer P"], taken["HTTP P"]) == pytest.approx((5.0, 5.0 + 5.0))


def test_images_that_are_encoded_at_once_count_once():
    stamps = made(
        (10, "proxy", "encode_sent"), (12, "E0", "received"), (12, "E1", "received"), (14, "E0", "queued"),
        (16, "E1", "queued"), (20, "E0", "scheduled"), (25, "E1", "scheduled"), (40, "E0", "computed"),
        (50, "E1", "computed"), (41, "E0", "answering"), (51, "E1", "answering"), (55, "proxy", "encode_done"),
        encode_sent={"to": "E0"}, encode_done={"by": "E1"},
    )  # fmt: skip
    taken = taken_ms(stamps)

    assert taken["encode"] == pytest.approx(30.0)
    assert taken["encode queue"] == pytest.approx(25.0 - 14.0)


def test_an_encode_ends_when_its_accelerator_has_done_it_however_early_its_stage_answers():
    stamps = made(
        (10, "proxy", "encode_sent"), (12, "E0", "received"), (14, "E0", "queued"), (20, "E0", "scheduled"),
        (24, "E0", "computed"), (26, "E0", "answering"), (28, "proxy", "encode_done"), (50, "E0", "encoded"),
        encode_sent={"to": "E0"}, encode_done={"by": "E0"},
    )  # fmt: skip
    taken = taken_ms(stamps)

    assert taken["encode"] == pytest.approx(50.0 - 20.0)
    assert "answer E" not in taken


def test_an_image_that_another_request_has_encoded_is_waited_for():
    stamps = made((60, "proxy", "encoded"), (65, "proxy", "dispatched"), encoded={"t0": 10.010})

    assert taken_ms(stamps)["encode queue"] == pytest.approx(50.0)


def test_kv_moves_while_its_packets_do_and_after_the_prefill_until_the_last_one_is_there():
    stamps = made(
        (10, "proxy", "dispatched"), (12, "P0", "received"), (13, "D0", "received"), (20, "P0", "scheduled"),
        (30, "P0", "kv_packet"), (60, "P0", "prefill_end"), (65, "D0", "kv_done"), kv_packet={"t0": 10.025},
    )  # fmt: skip

    assert taken_ms(stamps)["P→D"] == pytest.approx(5.0 + 5.0)


def test_past_the_proxy_a_stages_own_stamps_are_enough():
    events = [(5, "received"), (10, "queued"), (15, "scheduled"), (80, "computed"), (95, "answering")]
    stamps = [Stamp(10 + ms / 1e3, "EPD0", "x-3", event, {}) for ms, event in events]
    taken = taken_ms(stamps)

    assert taken["HTTP client"] == pytest.approx(4.0 + 5.0)
    assert taken["answer P"] == pytest.approx(15.0)


def test_requests_that_the_stamps_do_not_know_are_left_out():
    timeline = Timeline(made())

    assert joined(row(4, 10.0), timeline) is None
    assert joined(failed(3, 10.0), timeline) is None
    assert joined(msgspec.structs.replace(row(3, 10.0), sent_s=None), timeline) is None
