"""What `epd-serve why` prints: choices with their reasons, failures, and bars that are as long as things took."""

from __future__ import annotations

import time
from typing import Any

import pytest

from deploy.cli.why import BAR, MARK, list_text, request_text
from epd_serve.roles import Role
from proxy.errors import StageDied
from proxy.records.record import Record
from proxy.records.report import report, summary
from proxy.routing.plan import Path, Pick, Plan, Question
from proxy.routing.policy import Candidate

WIDTH = 100


def record(**more: Any) -> Record:
    one = Record("7f3a", "/v1/chat/completions", "order-17", **more)
    one.total_s = 1.0
    return one


def plan(path: Path, head: Pick, tail: Pick | None, because: str, skipped: str = "no items") -> Plan:
    return Plan(
        path, head, tail, 100.0, clear=True, decode_waits=False, encoders=(), skipped=skipped,
        question=Question(100.0), known=0, made_at=0.0, because=because,
    )  # fmt: skip


def text(one: Record, *others: str, width: int = WIDTH) -> str:
    return request_text(report(one), list(others), width)


def line_with(shown: str, word: str) -> str:
    return next(line for line in shown.splitlines() if word in line)


def test_what_became_of_it_is_said_first() -> None:
    one = record(outcome="200", status=200, media={"image": 2}, finish="stop", prompt_tokens=40, completion_tokens=7)
    one.attempted("E-P-D", "P0", "D1")
    one.encoded_by("E0")
    head = text(one, "5e2c").splitlines()
    assert head[0] == "request 7f3a (order-17): /v1/chat/completions, 2 images"
    assert "200 in 1.00 s by E-P-D: encode E0, prefill P0, decode D1" in head[1]
    assert "40 prompt tokens, 7 completion tokens" in head[2] and "finish stop" in head[2]
    assert "5e2c" in head[-1]


def test_the_gaps_between_its_tokens_are_told() -> None:
    one = record(outcome="200", status=200, gaps=40, gaps_within=38, gap_limit_s=0.05)
    assert "38 of 40 token gaps within 50.0 ms (95.0%)" in text(one)
    assert "gaps" not in text(record(outcome="200", status=200))


def test_a_refusal_says_what_it_met() -> None:
    one = record(outcome="429", status=429, code="overloaded", message="8 requests with text wait already")
    one.note("refused", reason="queue_full", kind="text", waiting=8, with_stages=12)
    shown = text(one)
    assert "overloaded: 8 requests with text wait already" in shown
    assert "refused queue_full text waiting=8 with_stages=12" in shown and "tokens" not in shown


def waits(**more: Any) -> dict[str, Any]:
    usual = {"paused": False, "before_s": 0.8, "slo_s": 2.0, "service_s": 0.3, "slack_s": 0.4, "over_share": False}
    return {**usual, "kind": "media", "waiting": 5, "with_stages": 3, **more}


def test_a_wait_is_told_with_what_decided_it() -> None:
    one = record(outcome="200", status=200)
    one.note("waits", line="encode", **waits(over_share=True))
    one.took("queued", one.clock, line="encode", passed=2)
    one.note("waits", line="serve", **waits(slack_s=-0.25, paused=True))
    shown = text(one)
    first, second = line_with(shown, "for an encoder:"), line_with(shown, "for prefill and decode:")
    assert first.startswith("  waited ") and second.startswith("  is waiting for"), "which has not come to its end"
    assert "0.80 s of work before it; its first token within 2.00 s, of which it needs 0.30 s itself" in first
    assert "0.40 s of slack left; its account was over its share then, so others went first; overtaken by 2" in first
    assert "new requests were held back; 0.80 s of work before it" in second
    assert "0.25 s too late for that, so it lets those go first that are in time" in second
    assert "overtaken" not in second and "share" not in second
    assert "waits encode media waiting=5 with_stages=3" in shown, "the line of time has who else was about"
    assert "before_s" not in shown and "passed" not in shown


@pytest.mark.parametrize(("slack_s", "late"), [(0.5, True), (4.0, False), (-0.5, False)])
def test_a_turn_that_came_too_late_is_told_where_there_was_slack(slack_s: float, late: bool) -> None:
    one = record(outcome="200", status=200)
    one.note("waits", line="serve", **waits(slack_s=slack_s))
    one.took("queued", time.monotonic() - 2.0, line="serve", passed=0)
    assert ("its turn came 1.50 s too late for that" in text(one)) == late


def test_of_an_order_without_slack_none_is_told() -> None:
    one = record(outcome="200", status=200)
    one.note("waits", line="serve", **waits(slack_s=None))
    assert line_with(text(one), "for prefill").endswith("prefill and decode: 0.80 s of work before it")


def test_who_did_not_wait_is_told_of_no_wait() -> None:
    one = record(outcome="200", status=200)
    one.note("waits", line="store", full=2)
    assert "for prefill" not in text(one) and "waits store full=2" in text(one)


def test_a_choice_shows_all_candidates_and_why_some_were_put_aside() -> None:
    one = record(outcome="200", status=200)
    candidates = [Candidate("P0", "a", 4000.0, rate=2000.0), Candidate("P1", "a", 100.0, rate=2000.0)]
    candidates.append(Candidate("P2", "a", 0.0, suspended=True))
    paths, ranks = ["P-D"] * 3, [(0, 0, 0), (0, 0, 0), (1, 0, 0)]
    head = Pick(candidates[1], "first-token", 100.0, candidates, paths, ranks)
    tail = Pick(Candidate("D0", "a", 0.0), "least-loaded", 1.0, [Candidate("D0", "a", 0.0)])
    one.planned(plan(Path(False, Role.P, Role.D), head, tail, "it arrived"))
    one.planned(plan(Path(False, None, Role.PD), head, None, "P0: stage_failed", "who takes the prompt encodes"))
    shown = text(one)
    assert "plan 1 (it arrived): P1 takes the prompt" in shown and "plan 1 (it arrived): D0 decodes" in shown
    assert "plan 2 (P0: stage_failed): P1 takes the prompt" in shown
    assert "encodes" not in line_with(shown, "plan 1") and "who takes the prompt encodes" in line_with(shown, "plan 2")
    assert "least predicted time: 100.0 ms, the next 2050.0 ms" in shown
    assert line_with(shown, " P0 ").split() == ["P0", "4000", "2000", "2.05", "s"]
    assert line_with(shown, "→").split()[:2] == ["→", "P1"]
    assert "its circuit is open" in line_with(shown, " P2 ")


def test_a_failure_and_its_retry_are_told_with_their_cause() -> None:
    one = record(outcome="200", status=200)
    one.failed("failed", StageDied("stage P0 broke its connection", stage="P0"), "P0", s=0.5)
    one.again("retry", stage="P0", failures=1, of="attempt")
    shown = text(one, width=140)
    assert "failed P0 stage_failed stage P0 broke its connection" in shown and "retry P0" in shown


def test_bars_are_where_and_as_long_as_things_were() -> None:
    one = record(outcome="200", status=200)
    one.events = [(0.5, "queued", {"s": 0.5, "line": "serve"}), (1.0, "answered", {"s": 0.5}), (0.5, "admitted", {})]
    shown = text(one)
    first, second, mark = (line_with(shown, name) for name in ("queued", "answered", "admitted"))
    width = len(first) - first.index(BAR)
    assert abs(first.count(BAR) - width / 2) <= 1 and abs(second.count(BAR) - width / 2) <= 1
    assert first.index(BAR) < second.index(BAR) and first.rindex(BAR) - second.index(BAR) in (-1, 0)
    assert mark.count(MARK) == 1 and abs(mark.index(MARK) - second.index(BAR)) <= 1
    assert {len(line) for line in (first, second, mark)} == {len(first)} and len(first) <= WIDTH


def test_no_line_of_time_is_wider_than_the_terminal() -> None:
    one = record(outcome="502", status=502)
    one.failed("failed", StageDied("x" * 500, stage="P0"), "P0", s=0.5)
    lines = text(one, width=80).splitlines()
    timeline = lines[next(at for at, line in enumerate(lines) if line.split()[:2] == ["at", "took"]) :]
    assert max(map(len, timeline)) <= 80


def test_a_list_has_a_line_for_each() -> None:
    refused = record(outcome="429", status=429, code="overloaded", began=95.0)
    lines = list_text([summary(refused)], now=100.0).splitlines()
    assert len(lines) == 2 and {"7f3a", "order-17", "429", "overloaded"} <= set(lines[1].split())
    assert "5.00 s" in lines[1]
    assert list_text([], 0.0) == "no request is remembered"
