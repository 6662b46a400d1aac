"""`epd-bench follow`: a simulated deployment whose layout follows the load.

In parts (`--only`), with decisions that are made as in a deployment that runs (`deploy/follow`). The first three are
simulated (`deploy/planner`); the first two have 16 devices, the profile of a core, and starts of four seconds:

    swing   three minutes of pictures, three minutes of text, again and again: goodput beside that of the best fixed
            layout, and of an oracle that knows when the load turns and which layout is best then, and pays for starts
    square  loads that go up and down with periods from two seconds to two hours, hardly any, and one endless burst:
            how often a move was taken back while the load stayed, and how many requests were starved
    day     a day of ModServe's comparison on 128 devices (`bench/follow/day.py`): devices used beside the fewest that
            serve it as a fixed layout, without a forecast, with and without P and D becoming each other
    live    such a swing on 16 simulated stages that run, beside what the simulator says of it (`live.py`)
    real    real stages on two devices, between two kinds of work whose best layouts differ (`real.py`)

Figures:

    swing_over_best_fixed, swing_over_oracle    goodput over theirs
    swing_attainment, swing_moves               share of requests within the SLO; changes of the layout
    flaps, starved                              of all square loads
    predicted_over_measured                     how far off it was, in the median of these moves, how busy the relieved
                                                group would be
    day_devices_over_static, day_over_tp4       device-seconds over those of the fewest devices that hold as a fixed
                                                layout, and over 32 monoliths of four
    day_attainment, day_worst_hour              share of the day's requests within the SLO, and of its worst hour's
    day_dropped                                 requests that never ended
    day_s                                       seconds in which all of the part was simulated
    live_…, live_predicted_…                    the same of `live`, measured and predicted; live_errors, live_cpu
    real_over_fixed                             goodput over that of the better of both fixed layouts; real_errors
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from bench.follow import day, live, real
from bench.follow.oracle import Scheduled
from bench.follow.traffic import Phase, requests_of
from bench.micro.measurement import Goal, Measurement, Row, Usually, flag, one_of, positive, several, whole
from bench.record import ROOT
from deploy.follow.moves import counts_of
from deploy.follow.outcome import errors_of
from deploy.follow.simulated import SimulatedFollower
from deploy.follow.types import Decision, Limits
from deploy.planner.profile import DeviceProfile, read_device_profile
from deploy.planner.simulate import Served, Simulated, simulate
from epd_serve.layout_parser import parse
from epd_serve.slo import Slo
from epd_serve.traffic import Request

PROFILE = "bench/results/profiles/plan.json"
PARTS = ("swing", "square", "day", "live", "real")
STAGES = {"live": "simulated stages that run", "real": "real stages"}
SLO = Slo(8000, 60, "p90")
"""TTFT five times that of four pictures alone."""
DEVICES, START_S, HALF_S = 16, 4.0, 180.0
SWING = (Phase(HALF_S, 3.0, 24.0), Phase(HALF_S, 40.0, 1.0))
SWING_SLO = Slo(8000, 35, "mean")
"""Of answers a third slower than from a full batch that nothing interrupts: no fixed layout serves both phases.
Monoliths and (E-PD) serve text, and are interrupted by pictures; what serves pictures has too few D for text."""
SWING_PICTURES, SWING_ANSWER = 1, 64
MEDIA, TEXT = "6E-5P-5D", "E-2P-13D"
"""For each phase of the swing the best of the few splits that were simulated."""
FIXED = ("TP1x16", "(E-PD)x16", "(E-P)x7-9D", "(E-P)x8-8D", "3E-4P-9D", "3E-5P-8D", MEDIA, TEXT)
"""Some of each family, by simulations of a minute; not all splits were looked at."""
LEADS_S = (0.0, START_S, 2 * START_S)
"""Before the load turns, that the oracle begins: the best of them counts."""
PERIODS_S = (2.0, 20.0, 60.0, 180.0, 600.0, 3600.0, 7200.0)
TRUE_S, BAND = 2.0, 1.25
"""What truly comes is what came in so many seconds; so many times as much is another load."""
STARVED_S = 2 * SLO.ttft_ms / 1e3
"""Ten times what four pictures take alone."""
HALF_USED = 0.5


def _profile(name: str) -> Path:
    """The file of this name: below the current folder, else, as the ones that are given by default, of this project."""
    return Path(name) if Path(name).exists() else ROOT / name


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    if "day" in arguments.only:
        cases = day.QUICK if arguments.quick else (*day.FOLLOWED, *day.FIXED)
        yield from day.measure(_profile(arguments.day_profile), cases, arguments.hour_s)
    profile = read_device_profile(_profile(arguments.profile))
    if "swing" in arguments.only:
        yield from swing(profile, arguments.cycles, seed=1)
    if "square" in arguments.only:
        for period_s in PERIODS_S[: arguments.periods]:
            half = period_s / 2
            turns = max(2, round(1800.0 / period_s))
            load = [Phase(half, 6.0, 4.0), Phase(half, 1.0, 0.0)] * turns
            yield {"part": "square", "load": f"period {period_s:g} s", **_square(profile, load)}
        yield {"part": "square", "load": "nearly nothing", **_square(profile, [Phase(1800.0, 0.0, 0.002)])}
        yield {"part": "square", "load": "endless burst", **_square(profile, [Phase(300.0, 6.0, 20.0)])}

    if "live" in arguments.only:
        runs = () if arguments.predict else arguments.live_runs
        yield from live.live(profile, arguments.live_half_s, arguments.live_cycles, served=runs)
    if "real" in arguments.only:
        yield from real.real(
            _profile(arguments.real_profile),
            arguments.real_phase_s,
            arguments.real_phases,
            measured=not arguments.predict,
        )


def swing(profile: DeviceProfile, cycles: int, seed: int) -> Iterator[Row]:
    requests = requests_of(SWING * cycles, seed, pictures=SWING_PICTURES, answer_tokens=SWING_ANSWER)
    for layout in FIXED:
        yield {
            "part": "swing",
            "what": f"fixed {layout}",
            **_said(simulate(parse(layout), profile, requests, slos=(SWING_SLO,))),
        }
    for lead_s in LEADS_S:
        turns = [(turn * HALF_S - lead_s, (MEDIA, TEXT)[turn % 2]) for turn in range(2 * cycles)]
        oracle = Scheduled(parse(MEDIA), profile, _limits(every_s=1.0), START_S, schedule=turns)
        yield {"part": "swing", "what": f"oracle {lead_s:g} s ahead", **_said(_run(oracle, requests, SWING_SLO))}
    follower = SimulatedFollower(parse(MEDIA), profile, _limits(), START_S, SWING_SLO.tpot_ms / 1e3)
    run = _run(follower, requests, SWING_SLO)
    yield {
        "part": "swing",
        "what": "follow",
        **_said(run),
        **_moves(follower),
    }


def _square(profile: DeviceProfile, load: Sequence[Phase]) -> Row:
    follower = SimulatedFollower(parse("2E-2P-2D"), profile, _limits(), START_S, SLO.tpot_ms / 1e3)
    run = _run(follower, requests_of(load, 2))
    return {
        **_said(run),
        **_moves(follower),
        "flaps": flaps(follower.decisions, load),
        "starved": starved(run, follower.decisions),
    }


def _moves(follower: SimulatedFollower) -> Row:
    """How many, and by how much the predictions were off of those that could be measured."""
    moves = sum(one.chosen is not None for one in follower.decisions)
    return {"moves": moves, "prediction_errors": [round(error, 3) for error in errors_of(follower.gains)]}


def flaps(decisions: Sequence[Decision], load: Sequence[Phase]) -> int:
    """Moves of a group's copies that were taken back while what truly came stayed within the band. Once the load has
    ended what is left of it goes from group to group, and so do devices."""
    found, moved = 0, dict[str, tuple[float, bool]]()
    end_s = sum(phase.seconds for phase in load)
    for one in decisions:
        if one.chosen is None or one.at_s > end_s:
            continue
        for name, count in counts_of(parse(one.layout)).items():
            if (to := one.chosen.counts[name]) == count:
                continue
            at_s, up = moved.get(name, (one.at_s, to > count))
            found += up != (to > count) and _steady(load, at_s, one.at_s)
            moved[name] = one.at_s, to > count
    return found


def _steady(load: Sequence[Phase], begin_s: float, end_s: float) -> bool:
    """Whether what came from then on, and until then, was one load."""
    times = [begin_s + TRUE_S * step for step in range(int((end_s - begin_s) / TRUE_S) + 1)]
    by_kind = zip(*(true_rates(load, at_s) for at_s in times), strict=True)
    return all(max(rates) <= BAND * min(rates) for rates in by_kind)


def true_rates(load: Sequence[Phase], at_s: float) -> tuple[float, float]:
    """Requests a second of text and with images, of the `TRUE_S` until then."""
    text = media = begin_s = 0.0
    for phase in load:
        within_s = max(0.0, min(at_s, begin_s + phase.seconds) - max(at_s - TRUE_S, begin_s))
        text, media = text + within_s * phase.text_rps, media + within_s * phase.media_rps
        begin_s += phase.seconds
    return text / TRUE_S, media / TRUE_S


def starved(run: Simulated, decisions: Sequence[Decision]) -> int:
    """Requests that waited far too long, or for ever, while for half of that time or more some group was less than half
    used, and nothing was done about it."""
    idle_s = [
        one.at_s
        for one in decisions
        if one.chosen is None
        and any(one.need[name] < HALF_USED * count for name, count in counts_of(parse(one.layout)).items() if count > 1)
    ]
    late = [one for one in run.served if one.ttft_s > STARVED_S]
    return sum(_between(idle_s, one) >= max(1, _between([each.at_s for each in decisions], one) / 2) for one in late)


def _between(times_s: Sequence[float], one: Served) -> int:
    """Of these times, ascending, those at which it waited."""
    return bisect_left(times_s, one.first_s) - bisect_left(times_s, one.at_s)


def _limits(every_s: float = 5.0) -> Limits:
    return Limits(DEVICES, every_s=every_s, switchable=True)


def _run(follower: SimulatedFollower, requests: Sequence[Request], slo: Slo = SLO) -> Simulated:
    return simulate(follower.layout, follower.profile, requests, slos=(slo,), tick=(1.0, follower))


def _said(run: Simulated) -> Row:
    attained = run.attained(0)
    rps = attained * len(run.served) / run.span_s if run.span_s else 0.0
    return {"requests": len(run.served), "attained": round(attained, 4), "goodput_rps": round(rps, 3)}


def figures(rows: Sequence[Row]) -> dict[str, float]:
    named = dict[str, float]()
    by_what = {row["what"]: row for row in rows if row["part"] == "swing"}
    if (follow := by_what.get("follow")) is not None:
        fixed, oracle = (
            max(row["goodput_rps"] for what, row in by_what.items() if what.startswith(word))
            for word in ("fixed", "oracle")
        )
        named["swing_over_best_fixed"] = round(follow["goodput_rps"] / fixed, 4)
        named["swing_over_oracle"] = round(follow["goodput_rps"] / oracle, 4)
        named["swing_attainment"], named["swing_moves"] = follow["attained"], follow["moves"]
    if square := [row for row in rows if row["part"] == "square"]:
        named |= {name: float(sum(row[name] for row in square)) for name in ("flaps", "starved")}
    if errors := [error for row in rows for error in row.get("prediction_errors", ())]:
        named["predicted_over_measured"] = round(median(errors), 3)
    return named | day.figures([row for row in rows if row["part"] == "day"]) | live.figures(rows) | real.figures(rows)


def about(arguments: argparse.Namespace) -> dict[str, str]:
    served = [part for part in ("live", "real") if part in arguments.only and not arguments.predict]
    return {"kind": "simulated" + "".join(f", {part}: {STAGES[part]}" for part in served)}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--predict", action="store_true", help="serve nothing: of live and real only what the simulator says of them"
    )


MEASUREMENT = Measurement(
    quick="one cycle of each swing, shorter ones live, the shorter periods, a day of half an hour",
    measure=measure,
    figures=figures,
    flags={
        "--only": flag("parts of it", PARTS, several(one_of(*PARTS))),
        "--profile": flag("of the devices", PROFILE),
        "--day-profile": flag("of the devices of the day", day.PROFILE),
        "--hour-s": flag("seconds in which an hour of the day passes", Usually(300.0, quick=75.0), positive),
        "--live-half-s": flag("of a phase of the live swing", Usually(180.0, quick=40.0), positive),
        "--live-cycles": flag("of the live swing", Usually(2, quick=1), whole()),
        "--live-runs": flag("that are served of the live swing", live.RUNS, several(one_of(*live.RUNS))),
        "--real-profile": flag("of the real stages' devices", real.PROFILE),
        "--real-phase-s": flag("of a phase of the real swing", Usually(190.0, quick=60.0), positive),
        "--real-phases": flag("of the real swing", 2, whole(2)),
        "--cycles": flag("of the swing", Usually(3, quick=1), whole()),
        "--periods": flag("of square waves, the shortest first", Usually(len(PERIODS_S), quick=3), whole()),
    },
    add_flags=add_flags,
    about=about,
    goals=(
        Goal("swing_over_oracle", ">=", 0.95),
        Goal("swing_over_best_fixed", ">=", 1.3),
        Goal("day_devices_over_static", "<=", 0.65),
        Goal("day_attainment", ">=", 0.99),
        Goal("day_dropped", "==", 0),
        Goal("day_s", "<=", 60, "with --quick"),
        Goal("live_over_oracle", ">=", 0.95),
        Goal("live_over_best_fixed", ">=", 1.3),
        Goal("live_errors", "==", 0),
        Goal("real_over_fixed_low", ">=", 1, "more than either, beyond the 90 % interval"),
        Goal("real_errors", "==", 0),
        Goal("flaps", "==", 0),
        Goal("starved", "==", 0),
        Goal("predicted_over_measured", "<=", 0.25),
    ),
)
add_arguments = MEASUREMENT.add_arguments
