"""What one model does on one kind of device (ModServe §4.1): the file that planner, simulator and budgets read.

`epd-serve profile MODEL` measures it on the devices at hand, `epd-serve profile --calibrate` corrects it by what a
deployment served, and a paper's figures can be written into one by hand. `docs/reference/profile.md` describes each
field. Times are seconds of a stage alone on its device; amounts are tokens of the language model, of an item those that
it has in the prompt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from epd_serve.errors import ConfigError
from epd_serve.sim.profile import Line, Profile, Seconds, checked, read_object

FRONT, ENCODE, PREFILL, DECODE = KINDS = ("front", "encode", "prefill", "decode")
"""Kinds of work: a step is a mixture of the last three."""


class Noise(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How far the profile is off, as measured on runs that it was not made from; 0 where nobody has looked.

    Attributes:
        ttft, tpot, e2e: median relative error of the prediction. repeat: the same of one run beside the same again.
    """

    ttft: Seconds = 0.0
    tpot: Seconds = 0.0
    e2e: Seconds = 0.0
    repeat: Seconds = 0.0


class DeviceProfile(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One model on one kind of device.

    Attributes:
        model: its name or folder. device: what it ran on. how: `measured`, `calibrated` or `paper`. date: ISO.
        versions: of vLLM, torch and the device's driver. comment: for people.
        stages: by tensor-parallel size, how long steps take and what a stage holds.
        front: from the client to a stage's scheduler, by tokens of a request's items: HTTP, media, the proxy.
        front_busy: of that, the seconds in which it keeps a core of the device busy (CPU only; else 0).
        handover: from the end of an item's encode until another stage can schedule it, by the item's tokens.
        kv: from the end of a prefill until another stage has the KV, by the prompt's tokens: what is exposed of it.
        slowdown: how many times as long both of two kinds of work take while they run side by side on one device, by
            `encode+prefill` and so on; 1 where they do not feel each other, 2 where they take turns.
        beside: how many times as long a kind of work takes while another device of the host does one, by
            `decode beside encode` and so on; what is not there counts as 1.
        host_devices: of a host, which `beside` is about: they share its memory, and on CPU what computes for the front.
        weight_bytes: of a stage by its role (`E`, `P`, `D`, `PD`, …), per device, by tensor-parallel size.
        encoder_free_kv_tokens: how many more tokens of KV a stage holds where it loads no encoder beside its language
            model, by tensor-parallel size (below 0: fewer); what is not there is unknown.
        encoder_free: P, D and PD are such stages (`without_encoder`).
        memory_bytes: of a device.
        spread: what steps take over what they are expected to, ascending: each value stands for as many steps. What a
            host shares among engine, API server and clients differs from step to step; () where all are alike.
        start_s: from a stage's start until it serves.
        noise: see there.
    """

    model: str
    device: str
    stages: dict[int, Profile]
    how: str = "measured"
    date: str = ""
    versions: dict[str, str] = {}
    comment: str = ""
    front: Line = Line()
    front_busy: Line = Line()
    handover: Line = Line()
    kv: Line = Line()
    slowdown: dict[str, Annotated[float, Meta(ge=1)]] = {}
    beside: dict[str, Annotated[float, Meta(ge=1)]] = {}
    host_devices: Annotated[int, Meta(ge=1)] = 1
    weight_bytes: dict[str, dict[int, int]] = {}
    encoder_free_kv_tokens: dict[int, int] = {}
    encoder_free: bool = False
    memory_bytes: int = 0
    spread: tuple[Annotated[float, Meta(gt=0)], ...] = ()
    start_s: Seconds = 0.0
    noise: Noise = Noise()

    def __post_init__(self) -> None:
        pairs = {pair_of(one, other) for one in KINDS for other in KINDS}
        if wrong := sorted(self.slowdown.keys() - pairs):
            raise ValueError(f"slowdown names {wrong[0]}; it has pairs such as encode+decode")
        if wrong := sorted(self.beside.keys() - {beside_name(one, other) for one in KINDS for other in KINDS}):
            raise ValueError(f"beside names {wrong[0]}; it has pairs such as decode beside encode")
        if list(self.spread) != sorted(self.spread):
            raise ValueError("spread has to ascend")
        if not self.stages:
            raise ValueError("stages has to name a tensor-parallel size")

    def slows(self, one: str, other: str) -> float:
        """Of two kinds of work; a kind beside itself takes turns, and so does what nobody has measured."""
        return self.slowdown.get(pair_of(one, other), 2.0)

    def without_encoder(self) -> DeviceProfile:
        """The same with P, D and PD that load no encoder (`--encoder-free`), whose memory their KV has.

        Raises:
            ConfigError: it does not say how much KV that is.
        """
        if self.encoder_free:
            return self
        if unknown := sorted(self.stages.keys() - self.encoder_free_kv_tokens.keys()):
            raise ConfigError(
                "--encoder-free: the profile does not say how much more KV a stage holds without the encoder at "
                f"tp{unknown[0]} (encoder_free_kv_tokens); measure it anew with epd-serve profile, or write it there",
                param="--profile",
            )
        stages, weights = {}, dict(self.weight_bytes)
        for tp, stage in self.stages.items():
            kv_tokens = stage.capacity.kv_tokens + self.encoder_free_kv_tokens[tp]
            stages[tp] = replace(stage, capacity=replace(stage.capacity, kv_tokens=kv_tokens))
        for role in weights.keys() & {"P", "D", "PD"}:
            encoder = weights.get("E", {})
            weights[role] = {tp: size - encoder.get(tp, 0) for tp, size in weights[role].items()}
        return replace(self, stages=stages, weight_bytes=weights, encoder_free=True)


def pair_of(one: str, other: str) -> str:
    """The name of a pair of kinds."""
    return "+".join(sorted((one, other), key=KINDS.index))


def beside_name(one: str, other: str) -> str:
    """The name of a kind of work beside one of another device."""
    return f"{one} beside {other}"


def read_device_profile(path: Path, flag: str = "--profile") -> DeviceProfile:
    """Raises ConfigError: it cannot be read, or is none; names the place, and the nearest known key."""
    what = f"profile {path}"
    return checked(DeviceProfile, read_object(path, what, flag), what, flag)


def write_device_profile(path: Path, profile: DeviceProfile) -> None:
    """Make or replace a file. Raises ConfigError: it cannot be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"profile {path}: {error.strerror}", param="--out") from error
