"""What goes wrong in production, on real stages of `(E-P)-D`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from deploy.host import processes
from store.arena import Arena, Lease
from store.errors import StoreFullError
from tests.e2e.bodies import Body, about, ask, chat, conversation, fresh, png
from tests.e2e.demo_prompts import PAIRWISE_DIFFERENT
from tests.e2e.serving import Serving
from tests.waiting import wait_for

Solo = Callable[[Body], list[list[int]]]
epd = pytest.mark.parametrize("launch", ["(E-P)-D"], indirect=True)
LONG_ANSWER = chat("Hello", max_tokens=8000, ignore_eos=True, stream=True)


def chat_about(url: str) -> Body:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    return {**chat("What?"), "messages": [{"role": "user", "content": content}]}


def _lease_one_more(arena: Arena, number: int, data: bytes) -> Lease | None:
    try:
        arena.put(f"filler-{number}", data, shape=(len(data),), dtype="uint8")
    except StoreFullError:
        return None
    return arena.lease(f"filler-{number}", verify=False)


@epd
def test_a_feature_that_cannot_be_stored_is_recomputed(launch: Serving, solo_answer: Solo) -> None:
    body = fresh(408)
    arena = Arena.attach(next(path for path in launch.shared_memory() if path.name.endswith("-arena")))
    held: list[Lease] = []
    waited, recomputed = launch.counters("E0").get("put_waited", 0), launch.recomputed("P0")
    try:
        for size_bytes in (64 << 10, 1 << 10):  # and what lies between the large ones
            block = bytes(size_bytes)
            while (lease := _lease_one_more(arena, len(held), block)) is not None:  # leased features are never evicted
                held.append(lease)
        assert ask(launch, body) == solo_answer(body)
        wait_for(lambda: launch.counters("E0").get("put_waited", 0) == waited + 1, "E to report a lack of room", 5)
        wait_for(lambda: launch.recomputed("P0") == recomputed + 1, "P to report that it recomputed", 5)
    finally:
        for lease in held:
            lease.release()
        arena.close()
    again, stored = fresh(409), launch.counters("E0").get("put", 0)
    assert ask(launch, again) == solo_answer(again)
    wait_for(lambda: launch.counters("E0").get("put", 0) > stored, "E to report that it stored the next one", 5)
    assert launch.recomputed("P0") == recomputed + 1


@epd
def test_a_client_that_leaves_frees_blocks_on_prefill_and_decode(launch: Serving) -> None:
    with httpx.stream("POST", launch.url + "/v1/chat/completions", json=LONG_ANSWER, timeout=60) as response:
        lines = response.iter_lines()  # kept: dropping the iterator would close the stream
        next(lines)
        wait_for(lambda: launch.requests_inside("D0") == 1, "D0 to decode", 10)
    for instance in ("P0", "D0"):
        wait_for(lambda i=instance: launch.requests_inside(i) == 0, f"{instance} to drop the request", 10)
        wait_for(lambda i=instance: launch.kv_blocks_in_use(i) == 0, f"{instance} to free its blocks", 10)
    idle = {"encode": 0, "prefill": 0, "decode": 0}
    wait_for(lambda: all(e["in_flight"] == idle for e in launch.instances().values()), "the table to be idle", 10)


@epd
def test_clients_that_leave_at_any_moment_leave_nothing_behind(launch: Serving, solo_answer: Solo) -> None:
    for moment in range(12):
        with pytest.raises(httpx.TimeoutException):
            launch.post("/v1/chat/completions", {**fresh(410), "max_tokens": 4000, "ignore_eos": True},
                        timeout=0.02 + 0.03 * moment)  # fmt: skip
    for instance in ("E0", "P0", "D0"):
        wait_for(lambda i=instance: launch.requests_inside(i) == 0, f"{instance} to drop the requests", 15)
    for instance in ("P0", "D0"):
        wait_for(lambda i=instance: launch.kv_blocks_in_use(i) == 0, f"{instance} to free its blocks", 15)
    assert ask(launch, fresh(411)) == solo_answer(fresh(411))


@epd
@pytest.mark.promise("bad-input")
@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({**chat("Hello"), "model": "gpt-nonsense"}, 404, "gpt-nonsense"),
        ({**chat("Hello"), "max_tokens": -1}, 400, "max_tokens"),
        ({**chat("Hello"), "kv_transfer_params": {"transfer_id": "x"}}, 400, "kv_transfer_params"),
        (chat("Hello " * 9000), 400, "8192"),
        (chat("What?", b"this is not a picture"), 400, "messages[0].content[0]"),
        (chat_about("http://127.0.0.1:9/secret.png"), 400, "media_address_refused"),
        ({**chat("Hello"), "temperature": "warm"}, 400, "temperature"),
    ],
    ids=[
        "unknown model",
        "negative max_tokens",
        "transfer params",
        "context overflow",
        "corrupt picture",
        "private address",
        "wrong type",
    ],
)
def test_bad_input_is_one_clear_error_and_the_server_stays_up(
    launch: Serving, body: Body, status: int, named: str
) -> None:
    response = launch.post("/v1/chat/completions", body)
    assert response.status_code == status, response.text[:500]
    error = response.json()["error"]
    assert named in error["message"] + str(error["param"]) + str(error["code"])
    assert launch.get("/health").status_code == 200


@epd
@pytest.mark.promise("recomputed")
@pytest.mark.parametrize("killed", ["P0", "D0", pytest.param("E0", marks=pytest.mark.slow)])
def test_a_killed_stage_is_restarted_and_requests_go_on(launch: Serving, solo_answer: Solo, killed: str) -> None:
    before = launch.instances()[killed]["incarnation"]
    group = launch.stage_pid(killed)
    os.kill(launch.api_server_pid(killed), signal.SIGKILL)
    body = fresh({"P0": 412, "D0": 413, "E0": 414}[killed])
    wait_for(lambda: not launch.instances()[killed]["up"], "the proxy to know", 5)
    assert launch.get("/health").status_code == (200 if killed == "E0" else 503)
    wait_for(lambda: not processes.group_members(group), "the dead stage's processes to go", 10)
    wait_for(launch.healthy, f"{killed} to be back", 180)
    assert launch.instances()[killed]["incarnation"] != before
    assert ask(launch, body) == solo_answer(body)


def _loses_its_stage(launch: Serving, body: Body) -> list[str]:
    """The lines of a stream whose D is killed after its third event."""
    lines: list[str] = []
    url = launch.url + "/v1/chat/completions"
    with launch.client.stream("POST", url, json=body) as response, contextlib.suppress(httpx.RemoteProtocolError):
        assert response.status_code == 200
        for line in filter(None, response.iter_lines()):
            lines.append(line)
            if len(lines) == 3:
                os.kill(launch.api_server_pid("D0"), signal.SIGKILL)
    return lines


@epd
@pytest.mark.promise("goes-on")
def test_a_stream_that_loses_its_stage_halfway_goes_on(launch: Serving) -> None:
    body = {**LONG_ANSWER, "max_tokens": 300, "seed": 7}  # by replay: exactly what it would have been
    undisturbed = launch.post("/v1/chat/completions", {**body, "stream": False}).json()
    body = {**body, "stream_options": {"include_usage": True}}
    *lines, migrations, done = _loses_its_stage(launch, body)
    assert (migrations, done) == (": x-epd-migrations: 1", "data: [DONE]")
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert (
        "".join(choice["delta"].get("content") or "" for choice in choices)
        == (undisturbed["choices"][0]["message"]["content"])
    )
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert events[-1]["usage"]["completion_tokens"] == undisturbed["usage"]["completion_tokens"]
    assert len({event["id"] for event in events}) == len({event["created"] for event in events}) == 1


@epd
@pytest.mark.promise("no-silent-cut")
def test_a_stream_that_cannot_go_on_ends_with_an_error_and_without_done(launch: Serving) -> None:
    body = {**LONG_ANSWER, "n": 2, "temperature": 0.5}
    events = [line.removeprefix("data: ") for line in _loses_its_stage(launch, body)]
    assert "[DONE]" not in events
    error = json.loads(events[-1])["error"]
    assert error["type"] and error["message"]
    assert not any("error" in json.loads(event) for event in events[:-1])
    wait_for(lambda: not launch.healthy(), "the proxy to know", 10)


@epd
def test_without_its_encoder_the_rest_serves_on_and_says_how(launch: Serving, solo_answer: Solo) -> None:
    text, picture = {**chat("Hello"), "max_tokens": 11}, fresh(415)
    with launch.slow_restarts():
        os.kill(launch.api_server_pid("E0"), signal.SIGKILL)
        wait_for(lambda: not launch.instances()["E0"]["up"], "the proxy to know", 5)
        _serves_without_its_encoder(launch, solo_answer, text, picture)
    wait_for(launch.healthy, "E0 to be back", 180)
    assert launch.get("/ready").json()["kinds"]["image"]["how"] == "E-P-D"


def _serves_without_its_encoder(launch: Serving, solo_answer: Solo, text: Body, picture: Body) -> None:
    assert launch.get("/health").status_code == 200
    ready = launch.get("/ready?kind=image")
    assert ready.status_code == 200 and ready.json()["status"] == "degraded" and ready.json()["missing"] == ["E"]
    assert ready.json()["kinds"]["image"] == {"served": True, "how": "P-D (no encoder is live: prefill encodes)"}
    assert launch.get("/ready?all").status_code == 503
    assert ask(launch, text) == solo_answer(text)
    assert ask(launch, picture) == solo_answer(picture)
    assert not launch.instances()["E0"]["up"], "all of this was without it"


@epd
@pytest.mark.slow
def test_a_request_outlives_the_death_of_the_stage_that_held_it(launch: Serving, solo_answer: Solo) -> None:
    body = {**chat("Hello"), "max_tokens": 11}
    answers: list[list[list[int]]] = []
    os.kill(launch.api_server_pid("P0"), signal.SIGSTOP)  # holds the request without an answer …
    asking = threading.Thread(target=lambda: answers.append(ask(launch, body)))
    asking.start()
    wait_for(lambda: launch.instances()["P0"]["in_flight"]["prefill"] == 1, "P to hold the request", 10)
    os.kill(launch.api_server_pid("P0"), signal.SIGKILL)  # … and dies
    asking.join(timeout=170)
    assert answers == [solo_answer(body)]


@epd
@pytest.mark.slow
@pytest.mark.promise("recomputed")
@pytest.mark.parametrize("killed", ["E0", "P0", "D0"])
def test_requests_for_one_image_outlive_the_death_of_a_stage_that_held_them(
    launch: Serving, solo_answer: Solo, killed: str
) -> None:
    """E dies before it has made the feature, P and D when it is stored and they have the requests."""
    body = fresh({"E0": 416, "P0": 417, "D0": 418}[killed])
    bodies = [{**body, "max_tokens": tokens} for tokens in (5, 6, 7, 8)]
    alone = [solo_answer(one) for one in bodies]
    encoded = launch.settled_counters("E0").get("encoded", 0)
    os.kill(launch.api_server_pid(killed), signal.SIGSTOP)
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda one: ask(launch, one), bodies)
        if killed == "E0":
            wait_for(lambda: launch.instances()["E0"]["in_flight"]["encode"] > 0, "E to be asked", 10)
        else:
            part = {"P0": "prefill", "D0": "decode"}[killed]
            wait_for(lambda: launch.instances()[killed]["in_flight"][part] > 0, f"{killed} to be asked", 10)
            wait_for(lambda: launch.counters("E0").get("encoded", 0) == encoded + 1, "E to have encoded it", 10)
        os.kill(launch.api_server_pid(killed), signal.SIGKILL)
        assert list(answers) == alone
    wait_for(launch.healthy, f"{killed} to be back", 180)


@pytest.mark.slow
@pytest.mark.parametrize(
    "launch",
    [("(E-P)-D", "--stage-args", "P:--num-gpu-blocks-override 40 --max-model-len 1024",
      "--stage-args", "D:--num-gpu-blocks-override 40 --max-model-len 1024")],
    indirect=True,
    ids=["tiny KV"],
)  # fmt: skip
class TestTinyKv:
    def test_fifty_requests_finish_without_a_lease_firing(self, launch: Serving, solo_answer: Solo) -> None:
        bodies = [about(PAIRWISE_DIFFERENT[number % len(PAIRWISE_DIFFERENT)]) for number in range(25)]
        turns = (6, 7, 8, 9, 12, 18, 19, 20, 21, 22)  # prompts of up to 503 tokens, 16 of the 40 blocks
        bodies += [conversation(turn, png(PAIRWISE_DIFFERENT[turn % 12].picture())) for turn in turns] * 2
        bodies += [chat("Hello")] * 5
        alone = [solo_answer(body) for body in bodies]
        with ThreadPoolExecutor(16) as pool:
            got = list(pool.map(lambda body: ask(launch, body), bodies))
        assert got == alone
        for instance in ("P0", "D0"):
            assert "failed:" not in launch.stage_log(instance)
            assert "refused" not in launch.stage_log(instance)
            assert launch.kv_blocks_in_use(instance) == 0


@pytest.mark.slow
@pytest.mark.mooncake
@pytest.mark.parametrize("launch", [("P-D", "--kv-transport", "mooncake")], indirect=True, ids=["mooncake"])
def test_kv_travels_by_mooncake_too(launch: Serving, solo_answer: Solo) -> None:
    for body in (chat("Hello"), about(PAIRWISE_DIFFERENT[9]), conversation(50)):
        assert ask(launch, body) == solo_answer(body)
