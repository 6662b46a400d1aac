"""D's scheduler side under vLLM's calls, against the real prefill desk over ipc."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from epd_serve import wire
from epd_serve.engine.kv.decode_scheduler import DecodeScheduler
from epd_serve.kv.control import PrefillControl
from epd_serve.kv.faults import Faults
from epd_serve.kv.lifecycle import Decode
from epd_serve.kv.params import prompt_hash, transfer_key
from epd_serve.kv.prefill_desk import Admission, PrefillDesk, PromptShape
from epd_serve.roles import Role
from epd_serve.wiring import StageWiring
from tests.epd_serve.engine.kv.fakes import BLOCK_SIZE, request, scheduled
from tests.waiting import PATIENCE_S, wait_for


class Workers:
    """D's, as far as its scheduler goes. `silent`: ranks that answer later."""

    def __init__(self, folder: Path, ranks: int = 2) -> None:
        self.silent: set[int] = set()
        self.to_lose = 0  # of what is said to them next
        self.told: list[tuple[int, wire.ToDecodeWorker]] = []
        self._routers = [zmq.Context.instance().socket(zmq.ROUTER) for _ in range(ranks)]
        for rank, router in enumerate(self._routers):
            router.bind(f"ipc://{folder}/D0.kvw{rank}")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        waiting: list[tuple[int, bytes, wire.Expect]] = []
        while not self._closing.wait(1e-3):
            for rank, router in enumerate(self._routers):
                while router.poll(0):
                    peer, data = router.recv_multipart()
                    if self.to_lose:
                        self.to_lose -= 1
                        continue
                    message = wire.to_decode_worker.decode(data)
                    self.told.append((rank, message))
                    if isinstance(message, wire.Expect):
                        waiting.append((rank, peer, message))
            for rank, peer, expect in [one for one in waiting if one[0] not in self.silent]:
                waiting.remove((rank, peer, expect))
                self._routers[rank].send_multipart([peer, wire.encode(wire.Expecting(expect.key))])

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        for router in self._routers:
            router.close(linger=0)


@pytest.fixture(autouse=True)
def workers(tmp_path: Path) -> Iterator[Workers]:
    made = Workers(tmp_path)
    yield made
    made.close()


@pytest.fixture
def p(tmp_path: Path) -> Iterator[PrefillControl]:
    control = PrefillControl(PrefillDesk("p1", 60.0), f"ipc://{tmp_path}/P0.kv", Faults())
    yield control
    control.close()


def scheduler_of(tmp_path: Path, silence_s: float = PATIENCE_S) -> DecodeScheduler:
    endpoint = f"ipc://{tmp_path}/D0.kvw{{rank}}"
    wiring = StageWiring("D0", Role.D, "d1", kv_worker_endpoint=endpoint, kv_peer_timeout_s=silence_s)
    return DecodeScheduler(wiring, BLOCK_SIZE, 2, lambda endpoint: 0.0)


@pytest.fixture
def d(tmp_path: Path) -> Iterator[DecodeScheduler]:
    scheduler = scheduler_of(tmp_path)
    yield scheduler
    scheduler.close()


def asked(tmp_path: Path, name: str = "r", prompt: int = 10, incarnation: str = "p1", **options: Any) -> Any:
    peer = {"instance": "P0", "incarnation": incarnation, "endpoint": f"ipc://{tmp_path}/P0.kv"}
    return request(name, prompt, {"transfer_id": "T", "peer": peer}, suffix="ffffffff", **options)


def reserve(d: DecodeScheduler, wanted: Any, table: list[int], computed: int = 0) -> None:
    d.queued(wanted)
    tokens = d.tokens_to_load(wanted, computed)
    d.reserve(wanted, SimpleNamespace(get_block_ids=lambda: (table,)), tokens)


def key(wanted: Any) -> Any:
    return transfer_key(wanted.kv_transfer_params, wanted.request_id)


def offered(p: PrefillControl, wanted: Any) -> Any:
    def look() -> Any:
        with p.lock:
            entry = p.desk._entries.get(key(wanted))
            return entry and entry.ready

    return wait_for(look)


def failures(d: DecodeScheduler) -> list[Any]:
    return wait_for(lambda: d.step(scheduled()).failed)


def test_a_reservation_offers_its_blocks_once(d: DecodeScheduler, p: PrefillControl, tmp_path: Path) -> None:
    wanted = asked(tmp_path, items=["img"])
    reserve(d, wanted, [5, 6, 7, 8])  # one block more than the prompt needs, for what is generated
    ready = offered(p, wanted)
    assert (ready.blocks, ready.start_token, ready.prompt_tokens) == ([5, 6, 7], 0, 10)
    assert (ready.source, ready.incarnation) == ("D0:d1", "p1")
    assert ready.prompt_hash == prompt_hash([1] * 10, ["img"])
    assert ready.endpoints == [f"ipc://{tmp_path}/D0.kvw{rank}" for rank in range(2)]
    (expected,) = d.step(scheduled()).expected
    assert (expected.key, expected.request, expected.blocks) == (key(wanted), wanted.request_id, (5, 6, 7))
    assert d.tokens_to_load(wanted, 0) == 0  # preempted later: it computes alone
    d.reserve(wanted, SimpleNamespace(get_block_ids=lambda: ([1],)), 0)
    assert not d.step(scheduled()).expected


def test_prefill_hears_of_blocks_when_all_workers_expect_their_transfer(
    d: DecodeScheduler, p: PrefillControl, workers: Workers, tmp_path: Path
) -> None:
    workers.silent = {1}
    wanted = asked(tmp_path)
    reserve(d, wanted, [5, 6, 7])
    wait_for(lambda: {rank for rank, _ in workers.told} == {0, 1})
    assert {message for _, message in workers.told} == {wire.Expect(key(wanted))}
    wait_for(lambda: d._control._offers[key(wanted)].unaware == {f"ipc://{tmp_path}/D0.kvw1"})
    assert d._desk._entries[key(wanted)].state is Decode.QUEUED  # to P it is a request that waits for blocks
    workers.silent = set()
    assert offered(p, wanted).blocks == [5, 6, 7]


def test_what_a_worker_was_told_in_vain_it_is_told_again(
    d: DecodeScheduler, p: PrefillControl, workers: Workers, tmp_path: Path
) -> None:
    workers.to_lose = 3
    wanted = asked(tmp_path)
    reserve(d, wanted, [5, 6, 7])
    assert offered(p, wanted).blocks == [5, 6, 7]


def test_one_that_cannot_be_told_keeps_no_other_from_it(
    d: DecodeScheduler, p: PrefillControl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failed = d._control._deliver, []

    def deliver(peer: str, message: object) -> None:
        if not failed:
            failed.append(peer)
            raise OSError("too many open files")
        real(peer, message)

    monkeypatch.setattr(d._control, "_deliver", deliver)
    wanted = asked(tmp_path)
    reserve(d, wanted, [5, 6, 7])
    assert offered(p, wanted).blocks == [5, 6, 7]
    assert failed


def test_a_client_that_leaves_before_all_workers_know_gets_its_blocks_back_when_they_do(
    d: DecodeScheduler, p: PrefillControl, workers: Workers, tmp_path: Path
) -> None:
    workers.silent = {0}
    wanted = asked(tmp_path)
    reserve(d, wanted, [5, 6, 7])
    d.finished(wanted)
    wait_for(lambda: p.desk.fate(key(wanted)))  # P hears that nothing will come
    assert d.step(scheduled()).failed == [], "a worker that hears of it later would wait for it"
    workers.silent = set()
    assert failures(d) == [key(wanted)]
    d.received({wanted.request_id})
    assert not (d._control._offers or d.step(scheduled()).failed)


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[DecodeScheduler]:
    """D on a vLLM that hands out blocks to which one step in flight may still write."""
    wiring = StageWiring("D0", Role.D, "d1", kv_worker_endpoint=f"ipc://{tmp_path}/D0.kvw{{rank}}")
    scheduler = DecodeScheduler(wiring, BLOCK_SIZE, 1, lambda endpoint: 0.0, steps_in_flight=1)
    yield scheduler
    scheduler.close()


def test_ready_waits_for_the_step_in_flight(hasty: DecodeScheduler, p: PrefillControl, tmp_path: Path) -> None:
    wanted = asked(tmp_path)
    reserve(hasty, wanted, [5, 6, 7])
    assert len(hasty.step(scheduled()).expected) == 1  # its own step is scheduled, the one before it still runs
    assert hasty._desk._entries[key(wanted)].state is Decode.QUEUED  # to P it is a request that waits for blocks
    hasty.step(scheduled())
    assert offered(p, wanted).blocks == [5, 6, 7]


def test_a_client_that_leaves_before_ready_left_gets_its_blocks_back_at_once(
    hasty: DecodeScheduler, p: PrefillControl, tmp_path: Path
) -> None:
    wanted = asked(tmp_path)
    reserve(hasty, wanted, [5, 6, 7])
    hasty.step(scheduled())
    hasty.finished(wanted)
    assert hasty.step(scheduled()).failed == [key(wanted)]
    wait_for(lambda: p.desk.fate(key(wanted)))  # P hears that nothing will come
    hasty.received({wanted.request_id})
    assert hasty.step(scheduled()).failed == []


def test_nothing_remains_of_a_request_that_left_before_its_transfer_ended(
    d: DecodeScheduler, p: PrefillControl, tmp_path: Path
) -> None:
    wanted = asked(tmp_path)
    reserve(d, wanted, [5, 6, 7])
    d.finished(wanted)
    d.received({wanted.request_id})  # its worker reports it later
    assert not (d._key_of or d._asked)


def test_a_prefix_hit_asks_for_the_rest_only(d: DecodeScheduler, p: PrefillControl, tmp_path: Path) -> None:
    wanted = asked(tmp_path)
    assert d.tokens_to_load(wanted, 8) == 2
    reserve(d, wanted, [5, 6, 7], computed=8)
    assert offered(p, wanted).start_token == 8
    assert d.step(scheduled()).expected[0].blocks == (7,)


def test_a_request_without_a_prefill_instance_loads_nothing(d: DecodeScheduler) -> None:
    alone = request("r", 10, None)
    d.queued(alone)
    assert d.tokens_to_load(alone, 0) == 0
    d.finished(alone)


def test_a_refusal_fails_the_transfer_once(d: DecodeScheduler, p: PrefillControl, tmp_path: Path) -> None:
    wanted = asked(tmp_path, incarnation="an earlier life")
    reserve(d, wanted, [5, 6, 7])
    assert failures(d) == [key(wanted)]
    d.finished(wanted)
    d.received({wanted.request_id})
    assert d.step(scheduled()).failed == []
    assert not d._desk._entries


def test_a_client_that_leaves_gets_its_blocks_back_after_the_acknowledgement(
    d: DecodeScheduler, p: PrefillControl, tmp_path: Path
) -> None:
    wanted = asked(tmp_path)
    reserve(d, wanted, [5, 6, 7])
    offered(p, wanted)
    assert d.step(scheduled()).failed == []
    d.finished(wanted)
    assert failures(d) == [key(wanted)]
    with p.lock:
        assert p.desk.fate(key(wanted)) == "cancelled by decode"


def test_a_client_that_leaves_before_blocks_were_reserved_cancels(
    d: DecodeScheduler, p: PrefillControl, tmp_path: Path
) -> None:
    wanted = asked(tmp_path)
    d.queued(wanted)
    d.finished(wanted)
    wait_for(lambda: p.desk.fate(key(wanted)))
    assert d.step(scheduled()).failed == []


def test_a_cancel_while_prefill_sends_waits_for_its_worker(
    d: DecodeScheduler, p: PrefillControl, tmp_path: Path
) -> None:
    wanted = asked(tmp_path)
    reserve(d, wanted, [5, 6, 7])
    ready = offered(p, wanted)
    with p.lock:
        admission = p.desk.admit(key(wanted), PromptShape(10, ready.prompt_hash, BLOCK_SIZE, 2), 0.0)
    assert admission is Admission.SEND
    d.finished(wanted)
    assert wait_for(lambda: p.stops) == [key(wanted)]
    assert d.step(scheduled()).failed == []  # P still holds it: no silence, no acknowledgement
    with p.lock:
        p.desk.closed(key(wanted))
    d.received({wanted.request_id})  # the worker had DONE(ok=False)
    assert not d._desk._entries


def test_heartbeats_keep_a_slow_transfer_and_silence_ends_it(
    d: DecodeScheduler, p: PrefillControl, tmp_path: Path
) -> None:
    wanted = asked(tmp_path)
    reserve(d, wanted, [5, 6, 7])
    offered(p, wanted)
    first = d._desk._leases.until[key(wanted)]
    wait_for(lambda: d._desk._leases.until[key(wanted)] > first)
    assert d.step(scheduled()).failed == []
    p.close()

    def patience_passes() -> list[Any]:
        with d._control.lock:
            leases = d._desk._leases.until
            leases.update(dict.fromkeys(leases, 0.0))  # each time: a heartbeat may still have been on its way
        return d.step(scheduled()).failed

    assert wait_for(patience_passes) == [key(wanted)]


def test_a_prefill_instance_that_is_not_there_fails_the_transfer_in_time(tmp_path: Path) -> None:
    d = scheduler_of(tmp_path, silence_s=0.2)
    wanted = asked(tmp_path)
    reserve(d, wanted, [5, 6, 7])
    assert failures(d) == [key(wanted)]
    d.close()


def test_queued_requests_renew_prefills_patience(d: DecodeScheduler, p: PrefillControl, tmp_path: Path) -> None:
    wanted = asked(tmp_path)
    with p.lock:
        p.desk.admit(key(wanted), PromptShape(10, "h", BLOCK_SIZE, 2), time.monotonic())
        first = p.desk._leases.until[key(wanted)]
    d.queued(wanted)
    wait_for(lambda: p.desk._leases.until[key(wanted)] > first)


def test_prefills_first_token_is_in_the_params_before_the_request_can_run(
    d: DecodeScheduler, p: PrefillControl, tmp_path: Path
) -> None:
    wanted = asked(tmp_path)
    wanted.kv_transfer_params["first_token"] = True
    reserve(d, wanted, [5, 6, 7])
    (expected,) = d.step(scheduled()).expected
    assert expected.awaits_token
    offered(p, wanted)
    with p.lock:
        p.desk.admit(key(wanted), PromptShape(10, prompt_hash([1] * 10, []), BLOCK_SIZE, 2), 0.0)
        p.desk.sampled(key(wanted), 7)
    p.flush()
    wait_for(lambda: d._desk._tokens)
    d.received({wanted.request_id})
    assert wanted.kv_transfer_params["goes_on_after"] == [7]
    assert d.step(scheduled()).told == [key(wanted)] and d.step(scheduled()).told == []


def test_tokens_that_were_shown_before_are_awaited_from_nobody(d: DecodeScheduler, tmp_path: Path) -> None:
    wanted = asked(tmp_path)
    wanted.kv_transfer_params["goes_on_after"] = [7, 8]
    reserve(d, wanted, [5, 6, 7])
    (expected,) = d.step(scheduled()).expected
    assert not expected.awaits_token


@pytest.mark.parametrize(
    ("output", "logged"), [([7, 8, 9], False), ([7], False), ([7, 9], True), ([9], True), ([], False)]
)
def test_an_answer_that_began_otherwise_is_in_the_log(
    d: DecodeScheduler, tmp_path: Path, caplog: pytest.LogCaptureFixture, output: list[int], logged: bool
) -> None:
    wanted = asked(tmp_path)
    wanted.kv_transfer_params["goes_on_after"] = [7, 8]
    wanted.output_token_ids = output
    d.finished(wanted)
    assert bool(caplog.records) is logged
