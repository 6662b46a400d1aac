"""`epd-bench ttft`: time to first token of an image, layouts or variants of one layout against each other.

Targets are up at once and take turns, in an order drawn for every turn, one request at a time: a noisy machine meets
them alike. An idle vLLM uses no CPU, and the share it does use is in the result. A monolith is asked twice per turn,
through the proxy and past it, so that the proxy's part shows. Two cores cannot show a gain from overlap; this shows
what the split costs.

`--mechanism` asks (E-P)-D with and without each part of the E→P mechanism instead. EPD-Serve's Table 2 asks what
asynchronous prefetching brings to the TTFT; here each part is taken away alone: features fetched on demand instead of
on their event, pixels sent to P and D instead of metadata, Mooncake instead of the arena. The whole mechanism stays
up, and each variant takes turns with it, so that both of a pair meet the same machine. One request at a time: what is
seen is latency on an idle P, not what queues hide.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.clients.records import RequestRecord
from bench.clients.sender import ask
from bench.micro.measurement import Measurement, Row, Usually, flag, one_of, positive, several, whole
from bench.micro.ttft_figures import VARIANTS, WHOLE, figures, tables
from bench.phases import DIRECT, DISAGGREGATED, MONOLITH, Milestone, groups, hidden, phases
from bench.processes import cpu_seconds, since
from bench.scratch import scratch
from bench.served import Served, served
from bench.stamps import Timeline, read_stamps
from bench.workloads.synthetic import DemoImage, demo_body, demo_image
from deploy.mm_store import what_is_missing
from epd_serve.demo.presets import PRESETS, write_preset
from epd_serve.errors import ConfigError

MODES = ("unique", "repeated")
MECHANISM = "(E-P)-D"
IDLE_S = 5.0


@dataclass(frozen=True)
class Target:
    """Something to ask: a layout through its proxy, or a monolith past it."""

    name: str
    url: str
    launch: Served
    milestones: tuple[Milestone, ...]


FLAGS = {
    "--layouts": flag("comma-separated; ratios are to the first", ("TP1", "(E-P)-D"), several(str)),
    "--mechanism": {"help": "(E-P)-D with and without each part of the mechanism", "action": "store_true"},
    "--without": flag("with --mechanism: parts to take away", tuple(VARIANTS), several(one_of(*VARIANTS))),
    "--preset": flag("the model", "demo", choices=PRESETS),
    "--requests": flag("per target and mode", Usually(30, quick=8), whole()),
    "--warmup": flag("requests per target before measuring", 5, whole(0)),
    "--modes": flag("new images, or one again and again", Usually(MODES, quick=MODES[:1]), several(one_of(*MODES))),
    "--pause": flag("seconds between requests", 0.5, positive),
    "--size": flag("image width and height in pixels", 224, whole(28)),
}


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """A row per request, and one per group of launches with the CPU that they use when idle."""
    if arguments.mechanism and "arena" in arguments.without and (missing := what_is_missing("cpu", master=True)):
        raise ConfigError(f"--without arena: {missing}, or leave arena out", param="--without")
    images = (demo_image(seed, arguments.size) for seed in itertools.count(1))
    with scratch() as folder, contextlib.ExitStack() as stack:
        model: tuple[str, ...] = ()
        if arguments.preset != "demo":
            write_preset(folder / arguments.preset, arguments.preset)
            model = (str(folder / arguments.preset),)
        if not arguments.mechanism:
            launches = [stack.enter_context(served(layout, model)) for layout in arguments.layouts]
            yield from measured(launches, images, arguments)
            return
        base = stack.enter_context(served(MECHANISM, model, name=WHOLE))
        for variant in (VARIANTS[name] for name in arguments.without):
            with served(MECHANISM, (*model, *variant.flags), name=variant.name) as launch:
                for row in measured([base, launch], images, arguments):
                    yield {**row, "compared": variant.name}


def targets_of(launch: Served) -> list[Target]:
    """The launch through its proxy; a monolith also past it, so that the proxy's part shows."""
    direct = launch.stage_url("EPD")
    if direct is None:
        return [Target(launch.name, launch.url, launch, DISAGGREGATED)]
    return [
        Target(launch.name, launch.url, launch, MONOLITH),
        Target(f"{launch.name} past the proxy", direct, launch, DIRECT),
    ]


def measured(launches: Sequence[Served], images: Iterator[DemoImage], arguments: argparse.Namespace) -> Iterator[Row]:
    """Warm up, look at the idle CPU, then all turns.

    Raises:
        StageError: a request was not answered whole.
    """
    targets = [target for launch in launches for target in targets_of(launch)]
    for target, _ in itertools.product(targets, range(arguments.warmup)):
        ask(target.url, demo_body(target.launch.model, next(images)))
    yield {"idle_cpu_share": idle_cpu_share(launches)}
    chance = random.Random(0)
    for mode in MODES[:1] if arguments.mechanism else arguments.modes:
        repeated = {target.name: next(images) for target in targets}
        for turn in range(-1 if mode == "repeated" else 0, arguments.requests):  # turn -1 fills the caches
            asked: dict[str, tuple[RequestRecord, Row]] = {}
            for target in chance.sample(targets, len(targets)):
                image = repeated[target.name] if mode == "repeated" else next(images)
                time.sleep(arguments.pause)  # the remains of the request before end
                before = cpu_seconds(target.launch.cpu_parts)
                record = ask(target.url, demo_body(target.launch.model, image))
                cpu_ms = milliseconds(since(before, cpu_seconds(target.launch.cpu_parts)))
                right = record.text == image.answer if arguments.preset == "demo" else None
                asked[target.name] = record, {"right": right, "cpu_ms": cpu_ms}
            time.sleep(arguments.pause)  # the last stamps are written after the answer
            for target in targets if turn >= 0 else ():  # in this order: the first one is what ratios are to
                record, more = asked[target.name]
                timeline = Timeline(read_stamps(target.launch.traces))
                where = phases_of(target.milestones, record, timeline.named(record.id))
                yield {"target": target.name, "mode": mode, "turn": turn, **more, **where}


def idle_cpu_share(launches: Sequence[Served]) -> dict[str, float]:
    """CPU that each part of each launch uses while nothing is asked of it, as a share of one core."""
    before = [cpu_seconds(launch.cpu_parts) for launch in launches]
    time.sleep(IDLE_S)
    return {
        f"{launch.name} {part}": round(seconds / IDLE_S, 4)
        for launch, then in zip(launches, before, strict=True)
        for part, seconds in since(then, cpu_seconds(launch.cpu_parts)).items()
    }


def phases_of(milestones: Sequence[Milestone], record: RequestRecord, stamped: Mapping[str, float]) -> Row:
    """Where a request's time went, in milliseconds from sending. The phases and the residual add up to the TTFT."""
    sent_s, first_s = record.sent_s, record.first_s
    assert sent_s is not None and first_s is not None, "a whole answer"
    events = {**stamped, "first_content": first_s}
    taken = phases(milestones, events, sent_s)
    return {
        "ttft_ms": round((first_s - sent_s) * 1e3, 3),
        "total_ms": round((record.ended_s - sent_s) * 1e3, 3),
        "residual_ms": round((first_s - sent_s - sum(taken.values())) * 1e3, 3),
        "phases_ms": milliseconds(taken),
        "groups_ms": milliseconds(groups(milestones, taken)),
        "hidden_ms": milliseconds(hidden(events)),
        "stamps_ms": milliseconds({name: at - sent_s for name, at in events.items()}),
    }


def milliseconds(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(each * 1e3, 3) for name, each in seconds.items()}


def about(arguments: argparse.Namespace) -> dict[str, str]:
    return {"kind": f"real stages, {arguments.preset} model, {arguments.size}² images"}


MEASUREMENT = Measurement(
    quick="8 requests per target, new images only",
    flags=FLAGS,
    about=about,
    measure=measure,
    figures=figures,
    tables=tables,
)
add_arguments = MEASUREMENT.add_arguments
