"""A load that swings, on real stages: two virtual devices, between two kinds of work whose best layouts differ by plan.

Questions about pictures with long answers want a device that only decodes, so that no picture holds up the tokens of
others (`EP-D`). Short prompts with long answers want two devices that decode (`TP1x2`). The same requests go to a
deployment that begins with the better layout for the first phase and follows the load, and to each layout kept as it
is. What the simulator says of each comes first, in rows of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.clients.bodies import streamed
from bench.clients.sender import Flow
from bench.clients.target import Request
from bench.follow.live import flow_of, over, predicted, run_load, slo_flags
from bench.follow.traffic import Phase, requests_of
from bench.micro.measurement import Row
from bench.served import check_memory, scratch, served
from bench.workloads.synthetic import image_body, text_body
from deploy.follow.planning import answer_by_plan
from deploy.follow.plans import Plans
from deploy.follow.simulated import SimulatedFollower
from deploy.follow.types import Limits
from deploy.memory.sizing import processor_configs
from deploy.planner.fleet import Options
from deploy.planner.profile import DeviceProfile, read_device_profile
from deploy.planner.simulate import Simulated, simulate
from epd_serve.demo.presets import write_preset
from epd_serve.image_tokens import image_tokens
from epd_serve.layout_parser import parse
from epd_serve.slo import Slo
from epd_serve.traffic import Item
from epd_serve.traffic import Request as Traffic

PROFILE = "bench/results/profiles/plan-float32.json"
PRESET = "bench"
STAGE_FLAGS = ("--device", "cpu", "--stage-args", "all:--dtype float32")
"""What the profile was made with."""
PICTURES, TEXT = "EP-D", "TP1x2"
SLO = Slo(8000, 350, "p99")
BY_SLO = Options(budgets=SLO)
SIDE = 392
QUESTION_TOKENS, PICTURE_ANSWER, TEXT_ANSWER = 32, 64, 96
PHASES = (Phase(1.0, 0.0, 1.0), Phase(1.0, 2.1, 0.0))
"""Requests a second, chosen by the simulator: of each phase one layout serves nearly all, the other half or less."""
SEED, DRAWS, COVERED = 5, 2000, (5, 95)


@dataclass(frozen=True)
class RealLoad:
    """What comes, the same for every deployment. `picture_tokens`: of one picture, by the model's rule."""

    drawn: Sequence[Traffic]
    phase_s: float
    count: int
    picture_tokens: int

    @classmethod
    def of(cls, phase_s: float, count: int, picture_tokens: int) -> RealLoad:
        phases = [PHASES[turn % 2] for turn in range(count)]
        drawn = requests_of([Phase(phase_s, one.text_rps, one.media_rps) for one in phases], SEED)
        return cls(drawn, phase_s, count, picture_tokens)

    @property
    def seconds(self) -> float:
        return self.phase_s * self.count

    def traffic(self) -> list[Traffic]:
        picture = Item(self.picture_tokens, SIDE, SIDE)
        return [
            Traffic(one.id, one.at_s, QUESTION_TOKENS + self.picture_tokens, PICTURE_ANSWER, (picture,))
            if one.items
            else Traffic(one.id, one.at_s, QUESTION_TOKENS, TEXT_ANSWER)
            for one in self.drawn
        ]

    def flows(self, model: str) -> list[Flow]:
        texts, pictures = [], []
        for seed, one in enumerate(self.drawn):
            if one.items:
                body = image_body(model, side=SIDE, answer=PICTURE_ANSWER, stream=True, seed=seed)
                pictures.append((one.at_s, _exactly(body)))
            else:
                body = text_body(model, tokens=QUESTION_TOKENS, answer=TEXT_ANSWER, stream=True, seed=seed)
                texts.append((one.at_s, _exactly(body)))
        return [flow_of("text", texts), flow_of("media", pictures)]


def _exactly(body: dict[str, Any]) -> Request:
    """With an answer of so many tokens, each an event."""
    return Request.of(streamed({**body, "ignore_eos": True, "return_token_ids": True}))


def real(profile_file: Path, phase_s: float, count: int, *, measured: bool = True) -> Iterator[Row]:
    """Args:
        count: of phases, each so long. measured: else only what the simulator says.

    Raises:
        ConfigError: no room for the stages.
    """
    profile = read_device_profile(profile_file)
    with scratch() as folder:
        model = folder / PRESET
        write_preset(model, PRESET)
        load = RealLoad.of(phase_s, count, image_tokens(processor_configs(model)).tokens(SIDE, SIDE))
        yield from predictions(profile, load)
        if not measured:
            return
        check_memory(4)
        follow = ["--follow", "act", "--follow-profile", str(profile_file.resolve())]
        for what, layout, more in (("follow", PICTURES, follow), (PICTURES, PICTURES, []), (TEXT, TEXT, [])):
            flags = [str(model), *STAGE_FLAGS, *slo_flags(SLO), *more]
            with served(layout, flags, traced=False) as launch:
                flows = load.flows(launch.model)
                row = run_load(launch, flows, SLO, phase_s=load.phase_s, seconds=load.seconds)
            yield {"part": "real", "how": "measured", "what": what, **row}


def predictions(profile: DeviceProfile, load: RealLoad) -> Iterator[Row]:
    """A row for each deployment. The planner's answers take no time here; live they take a minute or two."""

    def said(what: str, run: Simulated, **more: Any) -> Row:
        return {"part": "real", "how": "predicted", "what": what, **predicted(run, load.seconds), **more}

    traffic = load.traffic()
    for layout in (PICTURES, TEXT):
        yield said(layout, simulate(parse(layout), profile, traffic, slos=(SLO,), options=BY_SLO))
    limits = Limits(parse(PICTURES).device_count)
    plans = Plans(profile, SLO)
    follower = SimulatedFollower(
        parse(PICTURES), profile, limits, profile.start_s, SLO.tpot_ms / 1e3, plans=plans, planner=answer_by_plan
    )
    run = simulate(follower.layout, profile, traffic, slos=(SLO,), options=BY_SLO, tick=(1.0, follower))
    moves = [(round(one.at_s), one.chosen.layout) for one in follower.decisions if one.chosen is not None]
    yield said("follow", run, moves=moves)


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """`real_over_fixed` with its interval: phases are drawn anew with what came of each request."""
    named: dict[str, float] = {}
    for how, name in (("measured", "real_over_fixed"), ("predicted", "real_predicted_over_fixed")):
        by_what = {row["what"]: row for row in rows if row["part"] == "real" and row["how"] == how}
        if {"follow", PICTURES, TEXT} <= by_what.keys():
            named[name] = over(by_what["follow"], [by_what[PICTURES], by_what[TEXT]])
            if how == "measured":
                named |= _interval(by_what["follow"], max((by_what[PICTURES], by_what[TEXT]), key=_goodput))
    if measured := [row for row in rows if row["part"] == "real" and row["how"] == "measured"]:
        named["real_errors"] = float(sum(row["errors"] + row["cut"] for row in measured))
    return named


def _goodput(row: Row) -> float:
    return float(row["goodput_rps"])


def _interval(follow: Row, fixed: Row) -> dict[str, float]:
    """Of 90 %: of each phase as many requests as there were attain by chance what share of them did."""
    rng = np.random.default_rng(0)
    drawn = [
        sum(rng.binomial(count, good / count, DRAWS) for count, good in row["phases"] if count)
        for row in (follow, fixed)
    ]
    low, high = np.percentile(drawn[0] / np.maximum(drawn[1], 1), COVERED)
    return {"real_over_fixed_low": round(float(low), 4), "real_over_fixed_high": round(float(high), 4)}
