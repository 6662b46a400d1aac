"""A frame of `epd-serve top`: as wide and as high as the terminal, and what the keys make of it."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.cli.top_frame import KEYS, SORTS, Seen, View, frame, roles_of
from proxy.config.limits import Planned
from proxy.records.counts import Counts

WIDTH, HEIGHT = 80, 24


def instance(name: str, role: str, **more: Any) -> dict[str, Any]:
    return {
        "id": name, "role": role, "both": False, "node": "local", "devices": [0], "phase": "up", "reason": "",
        "restarts": 0, "up_s": 5.0, "in_flight": 0, **more,
    }  # fmt: skip


def row(pending_s: float | None = 0.0, **stage: Any) -> dict[str, Any]:
    store = {"used_bytes": 25, "capacity_bytes": 100}
    return {
        "pending_s": pending_s,
        "circuit": "closed",
        "reason": "",
        "stage": {"kv_tokens": 100, **stage},
        "store": store,
    }


def seen(count: int = 3, *, change: dict[str, Any] | None = None, rates: Counts | None = None) -> Seen:
    names = ["E0", "P0", "D0", *(f"P{number}" for number in range(1, count - 2))]
    instances = [instance(name, name.rstrip("0123456789")) for name in names]
    rows = {name: row(running=at, waiting=0, kv_used=at / 100) for at, name in enumerate(names)}
    rows["D0"]["pending_s"] = None
    deployment = {
        "launch": "f00d", "layout": "E-P-D", "state": "steady", "trouble": "", "paused_s": 0.0, "change": change,
        "past": [], "instances": instances,
    }  # fmt: skip
    return Seen(deployment, rows, (rates or Counts(seconds=60.0)).summary(), 0.0)


def lines(of: Seen, view: View | None = None, width: int = WIDTH, height: int | None = HEIGHT) -> list[str]:
    return frame(of, view or View(), width, height).plain.split("\n")


def shown(of: Seen, view: View | None = None, height: int | None = HEIGHT) -> list[str]:
    """The instances, from top to bottom."""
    told = lines(of, view, height=height)
    first = next(at for at, line in enumerate(told) if line.startswith("instance")) + 1
    ids = {one["id"] for one in of.deployment["instances"]}
    return [line.split()[0] for line in told[first:] if line.split() and line.split()[0] in ids]


CHANGE = {
    "what": "scale", "from": "E-P-D", "to": "2E-P-D", "state": "under way", "seconds": 4.0, "paused_s": 0.0,
    "cut_requests": 0, "reason": "",
    "steps": [{"action": "start", "instance": f"E{at}", "began_s": at, "seconds": None, "note": ""} for at in range(9)],
}  # fmt: skip


@pytest.mark.parametrize("count", [3, 12, 60])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (132, 43), (60, 15), (40, 10)])
@pytest.mark.parametrize("change", [None, CHANGE])
def test_a_frame_fits(count: int, width: int, height: int, change: Any) -> None:
    told = lines(seen(count, change=change), width=width, height=height)
    assert len(told) <= height and max(map(len, told)) <= width
    assert any(line.startswith("E0") for line in told) and told[-1].startswith(KEYS[:20])


def test_an_instance_shows_its_load_and_its_room() -> None:
    told = next(line for line in lines(seen()) if line.startswith("D0"))
    assert told.split()[:6] == ["D0", "D", "0", "up", "∞", "2"] and "2%" in told and "25%" in told


def test_rates_and_refusals_are_in_the_head() -> None:
    counts = Counts(60.0, {"200": 600, "429": 5}, {"overloaded": 5, "stage_failed": 2}, {"overloaded": 5}, retried=3)
    counts.running, counts.waiting = 12, 4
    counts.judged, counts.attained, counts.by_mean = 600, 594, 540
    head = "\n".join(lines(seen(rates=counts))[:5])
    assert "10.1 requests/s" in head and "running 12, 4 of them waiting" in head
    assert "refused 5 overloaded" in head and "errors 2 stage_failed" in head and "tried again 3" in head
    assert "within TTFT 2000 ms, TPOT 50 ms: p90 99.0%, mean 90.0%" in head


def test_lines_in_which_somebody_waits_are_shown_with_their_work() -> None:
    line = {"waiting": 7, "late": 2, "over_share": 3, "work_s": 1.25}
    counts = Counts(60.0, lines={"encode": line, "serve": dict.fromkeys(line, 0)})
    told = [one for one in lines(seen(rates=counts)) if one.startswith("in line")]
    assert told == ["in line (encode) 7 with 1.25 s of work, 2 late, 3 over their share"]


def test_front_doors_that_have_not_answered_are_named() -> None:
    whole, partly = Counts(60.0, answered=4, serving=4), Counts(60.0, answered=3, serving=4)
    said = "of 3 front doors: 4 serve, the others are late"
    assert said in lines(seen(rates=partly)) and said not in lines(seen(rates=whole))


def test_a_plan_stands_beside_what_is_measured_and_what_parts_from_it_is_said() -> None:
    counts = Counts(60.0, {"200": 600}, judged=600, attained=300, planned=Planned(2.0, 0.4, 0.02, 0.95))
    head = "\n".join(lines(seen(rates=counts))[:9])
    assert "planned: 2 requests/s, TTFT p50 400 ms, TPOT p50 20 ms, 95% within the SLO" in head
    assert "not as planned: 10 requests/s come, 2 were planned for" in head
    assert "not as planned: 50% are within the SLO, 95% were planned" in head


def test_actions_are_shown_as_they_happen_the_newest_first() -> None:
    told = lines(seen(change=CHANGE))
    at = told.index("actions")
    assert told[at + 1] == "scale E-P-D → 2E-P-D: 4 s so far"
    assert told[at + 2].split()[-3:-1] == ["start", "E8"]


def test_keys_sort_filter_scroll_and_end() -> None:
    many, view = seen(30), View()
    roles = roles_of(many)
    assert roles == ["D", "E", "P"]
    every = shown(many, view)
    assert every[0] == "E0" and len(every) < 30
    for _ in range(2):
        assert not view.press("s", roles)
    assert view.sort == SORTS[2] and shown(many, view)[0] == "P27"
    assert not view.press("f", roles) and shown(many, view) == ["D0"]
    for _ in range(len(roles)):
        view.press("f", roles)
    assert view.role == "" and not view.press("j", roles)
    assert shown(many, view)[0] == "P26"
    for _ in range(100):
        view.press("j", roles)
        shown(many, view)
    assert shown(many, view)[-1] == "E0", "the end of the list is the end of scrolling"
    assert view.press("q", roles)


def test_who_has_pending_work_for_ever_is_the_busiest() -> None:
    assert shown(seen(), View(sort="pending"))[0] == "D0"


def test_an_instance_that_nobody_knows_yet_has_no_numbers() -> None:
    one = seen()
    del one.table["E0"]  # type: ignore[attr-defined]
    told = next(line for line in lines(one) if line.startswith("E0"))
    assert told.split()[4:] == ["-", "0", "-", "-", "-", "-"]


def test_a_pipe_gets_every_instance() -> None:
    assert len(shown(seen(60), height=None)) == 60
