"""P's scheduler side under vLLM's calls, with the offers of a D that is played by the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from epd_serve import wire
from epd_serve.engine.kv.prefill_scheduler import AHEAD_TOKENS, PrefillScheduler
from epd_serve.kv.params import prompt_hash, transfer_key
from epd_serve.roles import Role
from epd_serve.wiring import StageWiring
from tests.epd_serve.engine.kv.fakes import BLOCK_SIZE, ready, request, scheduled
from tests.waiting import wait_for

PARAMS = {"transfer_id": "T", "incarnation": "p1"}


class PlayedDecode:
    """D's scheduler, by hand: one DEALER."""

    def __init__(self, endpoint: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)

    def offer(self, asked: Any, **changes: Any) -> wire.Ready:
        count = -(-asked.num_prompt_tokens // BLOCK_SIZE)
        items = [feature.identifier for feature in asked.mm_features]
        fields: dict[str, Any] = {
            "blocks": list(range(100, 100 + count)),
            "prompt_tokens": asked.num_prompt_tokens,
            "prompt_hash": prompt_hash(asked.prompt_token_ids, items),
            "endpoints": ["ipc:///d"],
        }
        changes = {**fields, **changes}
        blocks, prompt = changes.pop("blocks"), changes.pop("prompt_tokens")
        message = ready(transfer_key(PARAMS, asked.request_id), prompt=prompt, **changes)
        offer = wire.Ready(**{**{f: getattr(message, f) for f in message.__struct_fields__}, "blocks": blocks})
        self.send(offer)
        return offer

    def send(self, message: Any) -> None:
        self.socket.send(wire.encode(message))

    def hear(self, kind: type) -> Any:
        """The next message of this kind."""

        def take() -> Any:
            while self.socket.poll(0):
                message = wire.to_decode_scheduler.decode(self.socket.recv())
                if isinstance(message, kind):
                    return message
            return None

        return wait_for(take)


@pytest.fixture
def p(tmp_path: Path) -> Iterator[PrefillScheduler]:
    wiring = StageWiring("P0", Role.P, "p1", kv_endpoint=f"ipc://{tmp_path}/P0.kv")
    scheduler = PrefillScheduler(wiring, BLOCK_SIZE, 1)
    yield scheduler
    scheduler.close()


@pytest.fixture
def d(tmp_path: Path) -> Iterator[PlayedDecode]:
    played = PlayedDecode(f"ipc://{tmp_path}/P0.kv")
    yield played
    played.socket.close()


def admitted(
    p: PrefillScheduler, d: PlayedDecode, name: str = "r", prompt: int = 10, params: Any = PARAMS, **offer: Any
) -> Any:
    asked = request(name, prompt, params)
    assert not p.may_run(asked)
    d.offer(asked, **offer)
    wait_for(lambda: p.may_run(asked))
    return asked


def pairs(step: Any) -> list[tuple[int, int]]:
    return [pair for job in step.chunks for pair in zip(job.src, job.dst, strict=True)]


def test_a_request_without_params_runs_at_once_and_sends_nothing(p: PrefillScheduler) -> None:
    alone = request("r", 10, None)
    assert p.may_run(alone)
    assert not p.step(scheduled([(alone.request_id, [1, 2, 3], 0, 10)])).chunks
    assert p.finished(alone) == (False, None)


def test_one_step_sends_all_blocks_and_the_worker_report_ends_it(p: PrefillScheduler, d: PlayedDecode) -> None:
    asked = admitted(p, d)
    step = p.step(scheduled([(asked.request_id, [7, 8, 9], 0, 10)]))
    (job,) = step.chunks
    assert pairs(step) == [(7, 100), (8, 101), (9, 102)]
    assert (job.last, job.target, job.endpoints, job.request) == (True, "D0:1", ("ipc:///d",), asked.request_id)
    assert p.finished(asked) == (True, {"ok": True, "reason": ""})
    p.sent({asked.request_id})
    assert p._desk.fate(job.key) == "transfer is over"


def test_chunked_prefill_sends_whole_blocks_and_the_partial_one_last(p: PrefillScheduler, d: PlayedDecode) -> None:
    asked = admitted(p, d, prompt=14)
    name = asked.request_id
    first = p.step(scheduled([(name, [7, 8], 0, 6)]))
    second = p.step(scheduled(cached=[(name, None, 6, 1)]))
    third = p.step(scheduled(cached=[(name, [9], 7, 5)]))
    fourth = p.step(scheduled(cached=[(name, [10], 12, 2)]))
    assert [pairs(step) for step in (first, second, third, fourth)] == [
        [(7, 100)],
        [],
        [(8, 101), (9, 102)],
        [(10, 103)],
    ]
    assert [job.remaining for step in (first, third, fourth) for job in step.chunks] == [8, 2, 0]


def test_a_step_says_how_many_tokens_it_computes_in_all(p: PrefillScheduler, d: PlayedDecode) -> None:
    asked = admitted(p, d)
    busy, idle = p.step(scheduled([(asked.request_id, [7, 8], 0, 6), ("another", [1], 0, 3)])), p.step(scheduled())
    assert (busy.tokens, idle.tokens) == (9, 0)


def test_blocks_that_decode_has_cached_are_not_sent(p: PrefillScheduler, d: PlayedDecode) -> None:
    asked = admitted(p, d, start_token=8)
    assert pairs(p.step(scheduled([(asked.request_id, [7, 8, 9], 0, 6)]))) == []
    assert pairs(p.step(scheduled(cached=[(asked.request_id, None, 6, 4)]))) == [(9, 102)]


def test_blocks_that_prefill_has_cached_are_sent(p: PrefillScheduler, d: PlayedDecode) -> None:
    asked = admitted(p, d)
    assert pairs(p.step(scheduled([(asked.request_id, [7, 8, 9], 8, 2)]))) == [(7, 100), (8, 101), (9, 102)]


@pytest.mark.parametrize("as_new", [False, True])  # model runner v2 lists resumed requests as new
def test_a_resumed_request_sends_everything_again_from_its_new_blocks(
    p: PrefillScheduler, d: PlayedDecode, as_new: bool
) -> None:
    asked = admitted(p, d)
    name = asked.request_id
    p.step(scheduled([(name, [7, 8], 0, 8)]))
    assert p.step(scheduled(preempted=[name])).preempted == [name]
    assert p.may_run(asked)
    row = (name, [17, 18, 19], 0, 10)
    step = p.step(scheduled([row]) if as_new else scheduled(cached=[row], resumed=[name]))
    assert pairs(step) == [(17, 100), (18, 101), (19, 102)]
    assert step.chunks[0].last


def test_other_requests_of_the_step_are_left_alone(p: PrefillScheduler, d: PlayedDecode) -> None:
    asked = admitted(p, d)
    step = p.step(scheduled([("x", [1], 0, 4), (asked.request_id, [7, 8, 9], 0, 10)], [("y", [2], 9, 1)]))
    assert pairs(step) == [(7, 100), (8, 101), (9, 102)]


def test_a_request_aborted_before_ready_refuses_the_late_offer(p: PrefillScheduler, d: PlayedDecode) -> None:
    asked = request("r", 10, PARAMS)
    assert not p.may_run(asked)
    keep, answer = p.finished(asked)
    assert (keep, answer and answer["ok"]) == (False, False)
    d.offer(asked)
    assert d.hear(wire.Refused).reason == "prefill request ended early"


def test_a_request_aborted_after_the_offer_and_before_it_runs_tells_decode(
    p: PrefillScheduler, d: PlayedDecode
) -> None:
    asked = admitted(p, d)
    assert p.finished(asked)[0] is False
    assert d.hear(wire.CancelAck).key == transfer_key(PARAMS, asked.request_id)


def test_a_request_aborted_while_it_sends_keeps_its_blocks_until_the_worker_stopped(
    p: PrefillScheduler, d: PlayedDecode
) -> None:
    asked = admitted(p, d)
    p.step(scheduled([(asked.request_id, [7, 8], 0, 8)]))
    keep, answer = p.finished(asked)
    assert keep
    assert answer is not None
    assert not answer["ok"]
    assert p.step(scheduled()).stops == [asked.request_id]
    assert p.step(scheduled()).stops == []
    p.sent({asked.request_id})


def test_a_cancel_while_sending_stops_the_worker_and_sends_no_more(p: PrefillScheduler, d: PlayedDecode) -> None:
    asked = admitted(p, d)
    name = asked.request_id
    p.step(scheduled([(name, [7, 8], 0, 8)]))
    d.send(wire.Cancel(transfer_key(PARAMS, name)))
    wait_for(lambda: p._control.stops)
    step = p.step(scheduled(cached=[(name, [9], 8, 2)]))
    assert (step.stops, step.chunks) == ([name], [])
    assert p.finished(asked)[0] is True


def test_a_cancel_before_anything_was_sent_is_acknowledged_by_the_scheduler(
    p: PrefillScheduler, d: PlayedDecode
) -> None:
    asked = admitted(p, d)
    d.send(wire.Cancel(transfer_key(PARAMS, asked.request_id)))
    wait_for(lambda: p._control.stops)
    step = p.step(scheduled([(asked.request_id, [7, 8, 9], 0, 10)]))
    assert (step.stops, step.chunks) == ([], [])
    d.hear(wire.CancelAck)
    keep, answer = p.finished(asked)
    assert (keep, answer) == (False, {"ok": False, "reason": "cancelled"})


@pytest.mark.parametrize(
    "change", [{"prompt_hash": "other"}, {"prompt_tokens": 11}, {"blocks": [1]}, {"endpoints": []}]
)
def test_an_offer_for_another_prompt_is_refused_and_prefill_runs_alone(
    p: PrefillScheduler, d: PlayedDecode, change: dict[str, Any]
) -> None:
    asked = admitted(p, d, **change)
    assert not p.step(scheduled([(asked.request_id, [7, 8, 9], 0, 10)])).chunks
    refused = d.hear(wire.Refused)
    assert p.finished(asked) == (False, {"ok": False, "reason": refused.reason})


def test_items_are_part_of_the_prompt(p: PrefillScheduler, d: PlayedDecode) -> None:
    here, there = request("r", 10, PARAMS, items=["a"]), request("r", 10, PARAMS, items=["b"])
    assert not p.may_run(here)
    d.offer(there)
    wait_for(lambda: p.may_run(here))
    assert "different prompts" in d.hear(wire.Refused).reason


def test_decode_hears_a_heartbeat_while_its_transfer_is_held(p: PrefillScheduler, d: PlayedDecode) -> None:
    asked = admitted(p, d)
    assert d.hear(wire.Alive).keys == [transfer_key(PARAMS, asked.request_id)]


def test_children_of_one_request_are_sent_apart(p: PrefillScheduler, d: PlayedDecode) -> None:
    two = [admitted(p, d, name) for name in ("a", "b")]
    step = p.step(
        scheduled([(asked.request_id, [10 * i, 10 * i + 1, 10 * i + 2], 0, 10) for i, asked in enumerate(two)])
    )
    assert len({job.key for job in step.chunks}) == 2


def test_a_malformed_message_leaves_the_thread_alive(p: PrefillScheduler, d: PlayedDecode) -> None:
    d.socket.send(b"\xff")
    d.socket.send_multipart([b"a", b"b", b"c"])
    admitted(p, d)


def ended(asked: Any, *, status: str = "FINISHED_LENGTH_CAPPED") -> Any:
    asked.output_token_ids, asked.status = [7], SimpleNamespace(name=status)
    return asked


def test_the_first_token_goes_to_decode_and_with_the_end_to_the_proxy(p: PrefillScheduler, d: PlayedDecode) -> None:
    asked = admitted(p, d, params={**PARAMS, "first_token": True})
    (job,) = p.step(scheduled([(asked.request_id, [7, 8, 9], 0, 10)])).chunks
    assert p.finished(ended(asked)) == (True, {"ok": True, "reason": ""})
    assert d.hear(wire.FirstToken) == wire.FirstToken(job.key, 7)
    assert asked.stop_reason == f"{wire.TOKEN_SENT}7"


def test_the_proxy_is_told_where_no_kv_is_sent(p: PrefillScheduler, d: PlayedDecode) -> None:
    asked = request("r", 10, {**PARAMS, "first_token": True})
    assert not p.may_run(asked)
    d.send(wire.Cancel(transfer_key(PARAMS, asked.request_id)))
    wait_for(lambda: p.may_run(asked))
    assert p.finished(ended(asked)) == (False, {"ok": False, "reason": "cancelled by decode"})
    assert asked.stop_reason == f"{wire.KV_NOT_SENT}cancelled by decode"


@pytest.mark.parametrize(("first", "status"), [(True, "FINISHED_STOPPED"), (False, "FINISHED_LENGTH_CAPPED")])
def test_any_other_end_keeps_its_own_reason(p: PrefillScheduler, d: PlayedDecode, first: bool, status: str) -> None:
    asked = admitted(p, d, params={**PARAMS, "first_token": first})
    p.step(scheduled([(asked.request_id, [7, 8, 9], 0, 10)]))
    p.finished(ended(asked, status=status))
    assert asked.stop_reason is None


# --- ahead of D -----------------------------------------------------------------------------------------------------


@pytest.fixture
def early(p: PrefillScheduler) -> PrefillScheduler:
    """P with room for a request that D has no blocks for."""
    assert p.allow_ahead(lambda tokens: True) == AHEAD_TOKENS
    return p


def begun(p: PrefillScheduler, name: str = "r", prompt: int = 10, params: Any = PARAMS) -> Any:
    asked = request(name, prompt, params)
    assert p.may_run(asked)
    p.begun(asked)
    return asked


def ready_here(p: PrefillScheduler, asked: Any) -> bool:
    with p._control.lock:
        return p._desk.ready(transfer_key(PARAMS, asked.request_id)) is not None


def test_where_its_blocks_do_not_fit_beside_a_maximal_request_none_goes_ahead(p: PrefillScheduler) -> None:
    assert p.allow_ahead(lambda tokens: False) == 0
    assert not p.may_run(request("r", 10, PARAMS))


def test_one_request_at_a_time_begins_before_decode_has_blocks(early: PrefillScheduler, d: PlayedDecode) -> None:
    first = begun(early)
    assert not early.may_run(request("another", 10, PARAMS))
    d.offer(first)
    wait_for(lambda: early.may_run(request("third", 10, PARAMS)))


def test_a_request_that_vllm_does_not_let_in_after_all_is_not_ahead(early: PrefillScheduler) -> None:
    assert early.may_run(request("kept out by its features", 10, PARAMS))
    begun(early)


def test_a_long_prompt_waits_for_decode(early: PrefillScheduler) -> None:
    assert not early.may_run(request("r", AHEAD_TOKENS + 1, PARAMS))


def test_what_was_computed_ahead_leaves_in_the_first_step_after_the_offer(
    early: PrefillScheduler, d: PlayedDecode
) -> None:
    asked = begun(early, prompt=14)
    name = asked.request_id
    assert early.step(scheduled([(name, [7, 8], 0, 8)])).chunks == []
    d.offer(asked, start_token=4)
    wait_for(lambda: ready_here(early, asked))
    idle = early.step(scheduled([("another", [1], 0, 3)]))
    assert [(job.src, job.dst, job.remaining) for job in idle.late] == [((8,), (101,), 6)]
    step = early.step(scheduled(cached=[(name, [9, 10], 8, 6)]))
    assert (pairs(step), step.late, step.chunks[0].last) == ([(9, 102), (10, 103)], [], True)
    assert early.finished(ended(asked)) == (True, {"ok": True, "reason": ""})
    assert early.step(scheduled()).ended == []


def test_an_offer_during_the_step_sends_all_of_it_in_the_next_one(early: PrefillScheduler, d: PlayedDecode) -> None:
    asked = begun(early, params={**PARAMS, "first_token": True})
    early.step(scheduled([(asked.request_id, [7, 8, 9], 0, 10)]))
    d.offer(asked)
    wait_for(lambda: ready_here(early, asked))
    assert early.finished(ended(asked)) == (True, {"ok": True, "reason": ""})
    assert d.hear(wire.FirstToken).token == 7
    step = early.step(scheduled())
    assert [(job.src, job.dst, job.last) for job in step.late] == [((7, 8, 9), (100, 101, 102), True)]
    assert step.late[0].computed_at > 0 and step.ended == [asked.request_id]
    early.sent({asked.request_id})
    assert early._desk.fate(step.late[0].key) == "transfer is over"


def test_a_request_that_ended_before_decode_had_blocks_keeps_its_own_until_it_has(
    early: PrefillScheduler, d: PlayedDecode
) -> None:
    asked = begun(early, params={**PARAMS, "first_token": True})
    early.step(scheduled([(asked.request_id, [7, 8, 9], 0, 10)]))
    assert early.finished(ended(asked)) == (True, {"ok": True, "reason": ""})
    assert asked.stop_reason == f"{wire.TOKEN_SENT}7"
    nothing = early.step(scheduled())
    assert (nothing.late, nothing.ended, nothing.kept) == ([], [], 1)
    d.offer(asked)
    assert d.hear(wire.FirstToken).token == 7
    step = early.step(scheduled())
    assert (len(step.late), step.ended, step.kept) == (1, [asked.request_id], 0)


def test_a_cancel_frees_the_blocks_that_were_kept(early: PrefillScheduler, d: PlayedDecode) -> None:
    asked = begun(early)
    early.step(scheduled([(asked.request_id, [7, 8, 9], 0, 10)]))
    early.finished(ended(asked))
    d.send(wire.Cancel(transfer_key(PARAMS, asked.request_id)))
    d.hear(wire.CancelAck)
    step = early.step(scheduled())
    assert (step.late, step.ended) == ([], [asked.request_id])
    early.sent({asked.request_id})
    assert early.may_run(request("next", 10, PARAMS))


def test_a_cancel_between_the_offer_and_the_step_that_would_send(early: PrefillScheduler, d: PlayedDecode) -> None:
    asked = begun(early)
    early.step(scheduled([(asked.request_id, [7, 8, 9], 0, 10)]))
    early.finished(ended(asked))
    d.offer(asked)
    d.send(wire.Cancel(transfer_key(PARAMS, asked.request_id)))
    wait_for(lambda: early._control.stops)
    step = early.step(scheduled())
    assert (step.late, step.ended, step.stops) == ([], [asked.request_id], [])
    d.hear(wire.CancelAck)


def test_an_offer_that_does_not_fit_what_went_ahead_is_refused(early: PrefillScheduler, d: PlayedDecode) -> None:
    asked = begun(early)
    early.step(scheduled([(asked.request_id, [7, 8, 9], 0, 10)]))
    early.finished(ended(asked))
    d.offer(asked, prompt_hash="other")
    assert "different prompts" in d.hear(wire.Refused).reason
    assert early.step(scheduled()).ended == [asked.request_id]


def test_a_client_that_leaves_a_request_that_is_ahead_frees_it_at_once(
    early: PrefillScheduler, d: PlayedDecode
) -> None:
    asked = begun(early)
    early.step(scheduled([(asked.request_id, [7, 8, 9], 0, 10)]))
    keep, answer = early.finished(ended(asked, status="FINISHED_ABORTED"))
    assert (keep, answer and answer["ok"]) == (False, False)
    d.offer(asked)
    assert d.hear(wire.Refused).reason == "prefill request ended early"


def test_what_was_computed_ahead_and_then_preempted_does_not_leave(early: PrefillScheduler, d: PlayedDecode) -> None:
    asked = begun(early)
    name = asked.request_id
    early.step(scheduled([(name, [7, 8], 0, 8)]))
    d.offer(asked)
    wait_for(lambda: ready_here(early, asked))
    assert early.step(scheduled(preempted=[name])).late == []
    assert early.may_run(asked)
    assert pairs(early.step(scheduled([(name, [17, 18, 19], 0, 10)]))) == [(17, 100), (18, 101), (19, 102)]
