"""The scenarios of `epd-bench proxy`: what becomes of their samples, and what they send."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bench import proxy_burst, proxy_kills, proxy_streams
from bench.flows import BROKEN, CUT, GOOD, Outcome
from bench.front_door import held, instances, parse_metrics, total, until
from bench.load import LIMIT_S
from bench.proxy_kills import Kill, judged, victim
from bench.scenario_bodies import picture, text
from bench.served import groups
from epd_serve.errors import StageError
from epd_serve.sim.items import item_of
from epd_serve.sim.prompts import CHAT, prompts_of


def outcome(kind: str, due: float, first: float, ended: float, verdict: str = GOOD) -> Outcome:
    return Outcome(kind, due, first, ended, verdict)


# --- burst


def test_text_before_the_burst_is_set_against_text_in_it() -> None:
    outcomes = [
        outcome("text", 0.5, 9.5, 9.6),  # before all has settled
        outcome("text", 2.0, 2.1, 3.0),
        outcome("text", 11.0, 11.5, 12.0),
        outcome("picture", 11.0, 14.0, 15.0),
    ]
    rows = proxy_burst.phases("single", outcomes, 1.0, 10.0)
    assert [(row["kind"], row["phase"], row["first_p99_ms"]) for row in rows] == [
        ("text", "idle", 100.0),
        ("text", "burst", 500.0),
        ("picture", "burst", 3000.0),
    ]
    assert proxy_burst.over_idle(rows, "single") == 5.0


def test_a_text_that_fails_in_the_burst_is_no_quick_one() -> None:
    outcomes = [outcome("text", 2.0, 2.1, 3.0), outcome("text", 11.0, 11.01, 11.02, "status 429")]
    rows = proxy_burst.phases("single", outcomes, 1.0, 10.0)
    assert rows[1]["bad"] == 1 and rows[1]["first_p99_ms"] == LIMIT_S * 1e3 and rows[1]["errors"] == ["status 429: "]


# --- kills


def test_an_answer_of_which_nothing_came_is_an_error_and_a_stream_cut_by_a_death_is_counted_apart() -> None:
    outcomes = [
        outcome("text", 0.0, 0.5, 1.0),
        outcome("text", 4.0, 5.5, 6.0),
        outcome("text", 4.5, 4.8, 5.1, CUT),
        outcome("text", 4.6, 0.0, 5.1, "status 502"),
        outcome("picture", 4.7, 4.9, 5.1, BROKEN),
    ]
    figures, bad = judged(outcomes, [Kill(5.0, "D0")])
    assert figures["client_errors_under_kills"] == 2 and figures["streams_cut_by_kills"] == 1
    assert [one.verdict for one in bad] == [CUT, "status 502", BROKEN]
    assert figures["requests_hit"] == 4 and figures["hit_whole_p50_ms"] == 2000.0
    assert figures["other_whole_p99_ms"] == 1000.0


def test_a_run_without_kills_hits_nobody() -> None:
    figures, _ = judged([outcome("text", 0.0, 0.5, 1.0)], [])
    assert figures["requests_hit"] == 0 and "hit_whole_p50_ms" not in figures


def views(down: str = "", names: str = "E0 E1 P0 P1 D0 D1") -> list[dict[str, Any]]:
    return [{"id": name, "role": name[0], "up": name not in down.split()} for name in names.split()]


def test_instances_are_killed_in_turn() -> None:
    killed, order = "", []
    for _ in range(7):
        found = victim(views(), killed)
        assert found is not None
        order.append(killed := found)
    assert order == ["D0", "E0", "P0", "D1", "E1", "P1", "D0"]


def test_nobody_is_killed_whose_role_would_be_left_without_an_instance() -> None:
    assert victim(views(down="D1"), "") == "E0"
    assert victim(views(down="D1 E1 P1"), "") is None
    assert victim(views(names="E0 P0 P1 D0 D1"), "D0") == "E0", "prefill encodes where no encoder is left"
    assert victim(views(names="E0 P0 D0"), "E0") == "E0"


def test_the_real_stages_are_fewer_and_have_more_time() -> None:
    simulated, real = proxy_kills.plan(True, real=False), proxy_kills.plan(True, real=True)
    assert simulated.seconds == 60.0 and simulated.every_s == 10.0
    assert real.up_within_s > simulated.up_within_s and real.text_per_s < simulated.text_per_s
    assert proxy_kills.plan(False, real=False).seconds == 300.0


# --- streams


def test_streams_are_together_from_their_first_byte_to_their_end() -> None:
    outcomes = [
        outcome("s", 0.0, 1.0, 5.0),
        outcome("s", 0.0, 2.0, 3.0),
        outcome("s", 0.0, 3.5, 6.0),
        outcome("s", 0.0, 0.0, 9.0, "timeout"),
    ]
    assert proxy_streams.most_at_once(outcomes) == 2
    assert proxy_streams.most_at_once([]) == 0


# --- what is sent, and what is read


def test_prompts_have_the_tokens_that_were_asked_for() -> None:
    (prompt,) = prompts_of(CHAT, text("m", tokens=100, answer=3, stream=True, seed=7), 0)
    assert 100 <= prompt.tokens <= 106
    body = picture("m", side=56, answer=3, stream=False, seed=1)
    (prompt,) = prompts_of(CHAT, body, 0)
    assert prompt.items[0].tokens == 4 and body["max_tokens"] == 3


def test_pictures_are_valid_differ_and_are_small() -> None:
    first, second = (json.dumps(picture("m", side=1344, answer=1, stream=True, seed=seed)) for seed in (1, 257))
    assert first != second and len(first) < 20_000
    url = picture("m", side=1344, answer=1, stream=True, seed=1)["messages"][0]["content"][1]["image_url"]["url"]
    with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as shown:
        assert shown.size == (1344, 1344)
    item = item_of({"image_url": {"url": url}}, 0)
    assert item is not None and item.tokens == 48 * 48


def test_series_of_a_metric_are_read_by_their_whole_name() -> None:
    text = '# HELP a_total x\na_total{s="D0"} 2.0\na_total{s="D1"} 1.0\na_total_created 7.0\nb 3\n'
    found = parse_metrics(text, "a_total")
    assert found == {'a_total{s="D0"}': 2.0, 'a_total{s="D1"}': 1.0} and total(found) == 3.0


def test_a_front_door_that_is_shut_is_named() -> None:
    for reads in (held, instances):
        with pytest.raises(StageError, match=r"127\.0\.0\.1:1/instances"):
            reads("http://127.0.0.1:1")


def test_waiting_ends_with_the_condition_or_its_time() -> None:
    seen = iter([False, True])
    assert until(lambda: next(seen), 5.0)
    assert not until(lambda: False, 0.0)


def test_the_newest_process_of_an_instance_counts(tmp_path: Path) -> None:
    run = tmp_path / "launch"
    run.mkdir()
    lines = [{"instance": "P0", "pid": 1}, {"instance": "D0", "pid": 2}, {"instance": "P0", "pid": 3}]
    (run / "groups.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert groups(tmp_path) == {"P0": 3, "D0": 2}
