"""Exposed time, KV latency and overlap of a P→D transfer, from its stamps."""

from __future__ import annotations

import dataclasses

import pytest

from bench.micro.pd.transfers import PrefillStep, arrived, together, transfer_of_requests
from epd_serve.errors import StageError
from epd_serve.phases.stamps import Stamp
from tests.bench.micro.pd.transfers_made import BEGUN, STEP, stamps, transfer


def test_a_transfer_is_read_back_from_its_stamps():
    sent = transfer((5, 2, 1))

    assert arrived(stamps(sent), ["t"]) == {"t": sent}


def test_overlap_is_the_part_of_the_kv_latency_that_is_not_exposed():
    sent = transfer((2, 2, 2, 2), busy_s=0.005, exposed_s=0.004)

    assert sent.link_s == pytest.approx(0.020)
    assert sent.exposed_s == pytest.approx(0.004)
    assert sent.overlap == pytest.approx(0.8)
    assert sent.bytes_per_s == pytest.approx(8e6 / 0.020)
    assert sent.groups == (2, 2, 2, 2)


def test_pauses_between_packets_are_in_the_span_only():
    sent = transfer((4, 4), busy_s=0.001, exposed_s=0.001)

    assert sent.link_s == pytest.approx(0.002)
    assert sent.span_s == pytest.approx(0.046)


def test_a_packet_that_waited_for_another_counts_what_it_took_itself():
    (packet,) = transfer().packets
    waited = dataclasses.replace(transfer(), packets=(dataclasses.replace(packet, ended=packet.ended + 1.0),))

    assert waited.link_s == pytest.approx(0.002)


@pytest.mark.parametrize(("exposed_s", "shown_s", "overlap"), [(-0.003, 0.0, 1.0), (0.009, 0.009, 0.0)])
def test_nothing_is_hidden_more_than_wholly_or_less_than_not_at_all(exposed_s, shown_s, overlap):
    sent = transfer((8,), busy_s=0.002, exposed_s=exposed_s)

    assert sent.exposed_s == pytest.approx(shown_s)
    assert sent.overlap == overlap


def test_a_packet_that_transfers_share_counts_once():
    one = transfer((4, 4), busy_s=0.010, exposed_s=0.002)
    other = dataclasses.replace(one, id="u", done=one.done + 0.003)  # the same packets, later news

    both = together([one, other])

    assert len(both.packets) == 2
    assert both.link_s == pytest.approx(0.020)
    assert both.nbytes == one.nbytes
    assert both.exposed_s == pytest.approx(0.005)
    assert both.overlap == pytest.approx(0.75)


def test_packets_of_different_steps_add_up():
    one = transfer((8,), busy_s=0.010)
    later = tuple(dataclasses.replace(packet, begun=packet.begun + 1, ended=packet.ended + 1) for packet in one.packets)

    both = together([dataclasses.replace(one, packets=later), one])

    assert both.link_s == pytest.approx(0.020)
    assert [packet.begun for packet in both.packets] == sorted(packet.begun for packet in both.packets)


def test_a_transfer_alone_is_itself():
    one = transfer((5, 2, 1))

    assert together([one]) == one


def test_a_transfer_is_known_by_the_last_attempt_at_its_request():
    attempts = [Stamp(t, "proxy", "r", "dispatched", {"transfer": name}) for t, name in ((1.0, "a"), (2.0, "b"))]

    assert transfer_of_requests([*attempts, Stamp(3.0, "proxy", "r", "first_byte", {})]) == {"r": "b"}


def test_steps_of_other_prompts_are_left_out():
    sent = transfer()
    before = Stamp(BEGUN, "P0", "step", "prefill_step", {"t0": BEGUN - 1, "tokens": 7, "layers": []})
    after = Stamp(200.0, "P0", "step", "prefill_step", {"t0": 199.0, "tokens": 7, "layers": []})
    queued = Stamp(200.0, "P0", "step", "prefill_step", {"t0": STEP.ended - 0.001, "tokens": 7, "layers": []})

    assert arrived([before, *stamps(sent), after, queued], ["t"])["t"].steps == (STEP,)


def test_the_steps_of_a_prompt_in_chunks_are_all_its_own():
    second = PrefillStep(STEP.ended, STEP.ended + 0.05, 512, ())
    sent = dataclasses.replace(transfer(), steps=(STEP, second), prefill_end=second.ended, done=second.ended)

    assert arrived(stamps(sent), ["t"])["t"].steps == (STEP, second)


@pytest.mark.parametrize("event", ["prefill_start", "kv_first", "prefill_end", "kv_sent", "kv_done", "kv_packet"])
def test_a_transfer_has_not_arrived_while_a_stamp_is_missing(event):
    cut = [stamp for stamp in stamps(transfer()) if stamp.event != event]

    assert arrived(cut, ["t"]) == {}


def test_a_transfer_that_failed_is_no_sample():
    with pytest.raises(StageError, match="transfer t failed: kv_sent"):
        arrived(stamps(transfer(), ok=False), ["t"])


def test_failures_of_others_do_not_matter():
    assert arrived(stamps(transfer(), ok=False), ["u"]) == {}
