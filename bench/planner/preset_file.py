"""A preset's file: a figure of a paper as data. Owns its format; what is simulated is in `readings.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from deploy.planner.profile import DeviceProfile, read_device_profile
from epd_serve.image_tokens import ByArea, ImageTokens
from epd_serve.sim.profile import checked, read_object

Reading = Literal[
    "goodput", "attainment", "latency", "breakdown", "throughput", "devices", "batches", "streams", "intensity"
]
COMPUTED = ("batches", "streams", "intensity")
"""Readings that are arithmetic over the profile or the model's shapes."""
PROFILES_DIR = Path(__file__).parent / "profiles"
Row = dict[str, Any]
"""What came of a preset: about what it is, and the reading's columns."""
Positive = Annotated[float, Meta(gt=0)]
Some = Annotated[int, Meta(ge=1)]
Names = Annotated[tuple[str, ...], Meta(min_length=1)]


class Traffic(Struct, frozen=True, forbid_unknown_fields=True):
    """What comes. What is left out is the preset's.

    Attributes:
        mix: share of requests by workload: a name of `epd-bench workload --list`, or as `epd-serve plan` takes it.
        images, output_tokens: of a workload by name, instead of its own.
        profile, tokens: of another model: its device's file, its rule for images.
        slos: as of `--slo`. rates: requests a second, of all devices together.
    """

    name: str
    mix: Annotated[dict[str, Positive], Meta(min_length=1)]
    images: int | None = None
    output_tokens: int | None = None
    profile: str = ""
    tokens: ImageTokens | None = None
    slos: str = ""
    rates: tuple[Positive, ...] = ()


class Method(Struct, frozen=True, forbid_unknown_fields=True):
    """A system or setting that a figure compares; of several layouts it has the best.

    Attributes:
        layouts: of equal devices. policy: of the proxy. budgets: steps are held to the SLO.
        max_running, step_tokens, encoder_tokens: by role, instead of the profile's.
    """

    name: str
    layouts: Names
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
    layouts: Names


class Preset(Struct, frozen=True, forbid_unknown_fields=True):
    """A figure of a paper.

    Attributes:
        shows: what the paper shows there. source: its section.
        reading: see the first lines of `readings.py` and `arithmetic.py`. profile: of `bench/planner/profiles`.
        tokens: the model's rule for images.
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
    limit: Positive
    not_simulated: str
    printed: tuple[Printed, ...]
    tokens: ImageTokens = ByArea()
    traffic: tuple[Traffic, ...] = ()
    methods: tuple[Method, ...] = ()
    slos: str = ""
    rates: tuple[Positive, ...] = ()
    requests: Some = 300
    share: Annotated[float, Meta(gt=0, le=1)] = 0.9
    sizes: dict[str, tuple[Annotated[int, Meta(ge=0)], ...]] = {}
    shapes: dict[str, Some] = {}
    validated_by: Evidence | None = None


def read_preset(path: Path) -> Preset:
    """Raises ConfigError that names the file and the field at fault. That layouts of a preset have equal devices and
    that what it names is there, tests hold of those that ship."""
    what = f"preset {path}"
    return checked(Preset, read_object(path, what, "NAME"), what, "NAME")


def profile_of(name: str) -> DeviceProfile:
    """Raises ConfigError: there is no such file, or it is wrong."""
    return read_device_profile(PROFILES_DIR / f"{name}.json")
