"""A preset's file: a figure of a paper as data. Owns its format and checks; what is simulated is in `readings.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from msgspec import Struct

from epd_serve.errors import ConfigError
from epd_serve.image_tokens import ByArea, ImageTokens
from epd_serve.layout_parser import parse
from epd_serve.sim.profile import checked, read_object

Reading = Literal[
    "goodput", "attainment", "latency", "breakdown", "throughput", "devices", "batches", "streams", "intensity"
]
COMPUTED: frozenset[str] = frozenset({"batches", "streams", "intensity"})
"""Readings that are arithmetic over the profile or the model's shapes."""


class Traffic(Struct, frozen=True, forbid_unknown_fields=True):
    """What comes. What is left out is the preset's.

    Attributes:
        mix: share of requests by workload: a name of `epd-bench workload --list`, or as `epd-serve plan` takes it.
        images, output_tokens: of a workload by name, instead of its own.
        profile, tokens: of another model: its device's file, its rule for images.
        slos: as of `--slo`. rates: requests a second, of all devices together.
    """

    name: str
    mix: dict[str, float]
    images: int | None = None
    output_tokens: int | None = None
    profile: str = ""
    tokens: ImageTokens | None = None
    slos: str = ""
    rates: tuple[float, ...] = ()


class Method(Struct, frozen=True, forbid_unknown_fields=True):
    """A system or setting that a figure compares; of several layouts it has the best.

    Attributes:
        layouts: of equal devices. policy: of the proxy. budgets: steps are held to the SLO.
        max_running, step_tokens, encoder_tokens: by role, instead of the profile's.
    """

    name: str
    layouts: tuple[str, ...]
    policy: str = "first-token"
    budgets: bool = False
    max_running: dict[str, int] = {}
    step_tokens: dict[str, int] = {}
    encoder_tokens: dict[str, int] = {}


class Printed(Struct, frozen=True, forbid_unknown_fields=True):
    """A number or an order of the paper, and where it is found in what was simulated.

    Attributes:
        what: in words. source: figure or section. column: of the rows.
        of, over: methods: the first one's column, by the other one's where there is one. value: as printed.
        best: the method that the paper has ahead of `of`, all of them if empty.
        where: what rows have, such as `{"traffic": "POPE"}`.
    """

    what: str
    source: str
    column: str
    value: float | None = None
    of: str = ""
    over: str = ""
    best: str = ""
    where: dict[str, str | float] = {}


class Evidence(Struct, frozen=True, forbid_unknown_fields=True):
    """Real runs. record: a file of bench/results with predicted beside measured rows. layouts: of it."""

    record: str
    layouts: tuple[str, ...]


class Preset(Struct, frozen=True, forbid_unknown_fields=True):
    """A figure of a paper.

    Attributes:
        shows: what the paper shows there. source: its section.
        reading: see the first lines of `readings.py`. profile: of `bench/papers/profiles`. tokens: the model's rule for images.
        traffic, methods: all pairs are simulated. slos, rates: of traffic that has none of its own.
        requests: of a run. share: of them within the SLO, for goodput.
        sizes: of batches, or numbers of images and tokens. shapes: of the model, for `intensity`.
        printed: see there. not_simulated: what the figure has and this has not, and what is our choice.
        limit: relative error of times, absolute one of attainment, up to which real runs validate it.
    """

    paper: str
    figure: str
    source: str
    shows: str
    reading: Reading
    profile: str
    limit: float
    not_simulated: str
    printed: tuple[Printed, ...]
    tokens: ImageTokens = ByArea()
    traffic: tuple[Traffic, ...] = ()
    methods: tuple[Method, ...] = ()
    slos: str = ""
    rates: tuple[float, ...] = ()
    requests: int = 300
    share: float = 0.9
    sizes: dict[str, tuple[int, ...]] = {}
    shapes: dict[str, int] = {}
    validated_by: Evidence | None = None


def read_preset(path: Path) -> Preset:
    """Raises ConfigError that names the file and the field: malformed, layouts of unequal devices, unknown methods."""
    what = f"preset {path}"
    preset = checked(Preset, read_object(path, what, "NAME"), what, "NAME")

    def refused(field: str, fault: str) -> ConfigError:
        return ConfigError(f"{what}: {fault} - at `$.{field}`", param="NAME")

    for field in () if preset.reading in COMPUTED else ("traffic", "methods"):
        if not getattr(preset, field):
            raise refused(field, "it is empty")
    devices: dict[str, int] = {}
    for number, method in enumerate(preset.methods):
        for text in method.layouts:
            try:
                devices[text] = parse(text).device_count
            except ConfigError as error:
                raise refused(f"methods[{number}].layouts", str(error)) from error
    if len(set(devices.values())) > 1:
        named = ", ".join(f"{layout} has {count}" for layout, count in devices.items())
        raise refused("methods", f"layouts of unequal devices: {named}")
    names = [one.name for one in preset.methods]
    for number, printed in enumerate(preset.printed):
        for field in ("of", "over", "best"):
            name = getattr(printed, field)
            if names and name and name not in names:
                raise refused(f"printed[{number}].{field}", f"no method is called {name!r}")
    return preset
