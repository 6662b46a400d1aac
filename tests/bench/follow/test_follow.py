"""`epd-bench follow`: what a flap is, what is starved, and which figures follow from rows."""

from __future__ import annotations

from bench.follow.command import FIXED, STARVED_S, SWING, figures, flaps, starved
from bench.follow.traffic import Phase, day, rates_at, requests_of
from deploy.follow.types import Decision, Move
from deploy.planner.simulate import Served, Simulated


def decision(at_s: float, layout: str, to: dict[str, int] | None, need: float) -> Decision:
    move = None if to is None else Move("scale", "", to, "E", 1.0, 1.0, "")
    return Decision(at_s, layout, {}, {"E": need, "P": 1.0, "D": 1.0}, {}, move)


def test_what_is_taken_back_while_the_load_stays_is_a_flap() -> None:
    down, up = decision(10.0, "3E-P-D", {"E": 2, "P": 1, "D": 1}, 1.3), {"E": 3, "P": 1, "D": 1}
    steady, fast = [Phase(400.0, 2.0, 1.0)], [Phase(1.0, 4.0, 2.0), Phase(1.0, 0.0, 0.0)] * 200
    for load in (steady, fast):
        assert flaps([down, decision(300.0, "2E-P-D", up, 1.3)], load) == 1
        assert flaps([down, decision(300.0, "2E-P-D", None, 1.3)], load) == 0
    turned = [Phase(100.0, 2.0, 1.0), Phase(300.0, 2.0, 1.5)]
    assert flaps([down, decision(300.0, "2E-P-D", up, 1.3)], turned) == 0, "more has come since"
    assert flaps([down, decision(90.0, "2E-P-D", up, 1.3)], turned) == 1


def test_who_waits_long_while_others_have_nothing_to_do_is_starved() -> None:
    def served(at_s: float, first_s: float) -> Served:
        return Served("", at_s, first_s, first_s + 1, 2, 1, (1,))

    late, soon, never = served(0.0, 60.0), served(0.0, STARVED_S / 2), served(0.0, float("inf"))
    idle = [decision(at_s, "2E-P-3D", None, 1.8) for at_s in range(5, 65, 5)]
    busy = [decision(at_s, "2E-P-D", None, 1.8) for at_s in range(5, 65, 5)]
    run = Simulated((), [late, soon, never], 61.0, {}, 0.0)
    assert starved(run, idle) == 2 and starved(run, busy) == 0


def test_phases_follow_one_another_at_their_rates() -> None:
    requests = requests_of([Phase(100.0, 0.0, 5.0), Phase(100.0, 8.0, 0.0)], 1)
    assert [one.at_s for one in requests] == sorted(one.at_s for one in requests)
    first, second = ([one for one in requests if low <= one.at_s < low + 100] for low in (0, 100))
    assert all(one.items for one in first) and 400 < len(first) < 600
    assert not any(one.items for one in second) and 700 < len(second) < 900
    assert requests == requests_of([Phase(100.0, 0.0, 5.0), Phase(100.0, 8.0, 0.0)], 1) and len(SWING) == 2


def test_following_is_set_beside_the_best_of_each_kind() -> None:
    def row(what: str, rps: float) -> dict[str, object]:
        return {"part": "swing", "what": what, "goodput_rps": rps, "attained": 0.9, "moves": 4}

    rows = [row(f"fixed {FIXED[0]}", 8.0), row("fixed other", 10.0), row("oracle 4 s ahead", 12.5), row("follow", 12.0)]
    square = [{"part": "square", "flaps": 1, "starved": 2}, {"part": "square", "flaps": 0, "starved": 3}]
    found = figures(rows + square)
    assert (found["swing_over_best_fixed"], found["swing_over_oracle"]) == (1.2, 0.96)
    assert (found["flaps"], found["starved"]) == (1.0, 5.0)


def test_a_day_has_its_busiest_hours_apart_and_more_images_in_its_burst() -> None:
    assert max(range(24), key=lambda hour: rates_at(hour)["text"]) == 14
    assert rates_at(20.0)["burst"] == 0.0 < rates_at(12.0)["burst"] and rates_at(12.0)["calm"] == 0.0
    requests = day(5.0, 1)
    assert requests[0].at_s > 0 and requests[-1].at_s < 24 * 5.0 and requests == day(5.0, 1)
    assert [one.at_s for one in requests] == sorted(one.at_s for one in requests)

    def images(begin: float, end: float) -> float:
        with_images = [len(one.items) for one in requests if one.items and begin <= one.at_s / 5.0 < end]
        return sum(with_images) / len(with_images)

    assert images(11.0, 13.0) > 1.5 * images(16.0, 24.0)


def test_a_day_is_set_beside_the_fewest_devices_that_hold() -> None:
    def row(what: str, devices: float, attained: float) -> dict[str, object]:
        common = {"part": "day", "dropped": 0, "worst_hour": 0.9}
        return {**common, "what": what, "devices": devices, "attained": attained}

    rows = [row("fixed", 100.0, 0.98), row("fixed", 120.0, 0.991), row("fixed", 128.0, 1.0), row("follow", 60.0, 0.995)]
    found = figures([*rows, row("reactive", 72.0, 0.97), {"part": "day", "what": "all", "seconds": 50.0}])
    assert found["day_devices_over_static"] == 0.5 and found["day_reactive_over_static"] == 0.6
    assert found["day_attainment"] == 0.995 and found["day_dropped"] == 0.0 and found["day_s"] == 50.0
    assert "day_devices_over_static" not in figures([rows[0], rows[3]]), "nothing fixed holds"
