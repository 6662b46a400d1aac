"""What is compared: layouts and baselines, each with its name, its devices and its folder. Pure; nothing is started."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated

import msgspec

from bench.example_proxies import PEERS as EXAMPLES
from epd_serve.errors import ConfigError
from epd_serve.layout import Layout
from epd_serve.layout_parser import parse
from epd_serve.placement import check_servable
from epd_serve.roles import Role

_UNSAFE = re.compile(r"[^A-Za-z0-9.+-]")


class ServedBy(StrEnum):
    """What serves a deployment: `epd-serve serve`, plain vLLM servers, or an example proxy over our stages."""

    LAYOUT = "layout"
    VLLM = "vllm"
    PEER_VLLM = "peer-vllm"
    PEER_ASCEND = "peer-ascend"


PEERS = {ServedBy(peer.flag.removeprefix("--")): peer for peer in EXAMPLES}

WHY_NO_PEER = (
    "the example proxies can drive layouts of E and PD alone, as (E-PD) or 2E-PD. Where P and D are apart they ask P "
    "with vLLM's do_remote_decode and hand its answer to D; our P and D move KV only under a transfer that our proxy "
    "opens at D first, so that D would compute every prompt again, which is not that layout"
)


@dataclass(frozen=True, slots=True)
class Deployment:
    """One line of the comparison.

    Attributes:
        name: in every table and figure.
        layout: in its canonical form; plain vLLM is the layout that it amounts to.
        devices: how many it occupies.
        flags: of `epd-serve serve`, or of each plain vLLM.
        slug: the name of its folder.
    """

    name: str
    layout: str
    devices: Annotated[int, msgspec.Meta(ge=1)]
    served_by: ServedBy = ServedBy.LAYOUT
    flags: tuple[str, ...] = ()
    slug: str = ""

    @property
    def baseline(self) -> bool:
        return self.served_by is not ServedBy.LAYOUT

    @property
    def label(self) -> str:
        """Name and device count, as every legend has it."""
        return f"{self.name}, {self.devices} {'device' if self.devices == 1 else 'devices'}"


def deployments(
    layouts: str,
    *,
    flags: Sequence[str] = (),
    vllm: bool = False,
    vllm_flags: Sequence[str] = (),
    peers: Sequence[ServedBy] = (),
) -> tuple[Deployment, ...]:
    """The deployments in the order in which they are measured: layouts, then baselines.

    Args:
        layouts: with commas between. flags: of each.
        vllm: plain vLLM too, at every number of devices that a layout has: one server per device.
        peers: each over every layout that it can drive.

    Raises:
        LayoutError: a layout that does not parse, or cannot serve; with a caret under the fault.
        ConfigError: no layout, one of them twice, a peer that can drive none.
    """
    names = [name.strip() for name in layouts.split(",") if name.strip()]
    if not names:
        raise ConfigError("--layouts names no layout", param="--layouts")
    parsed = {name: _servable(name) for name in names}
    if len({str(layout) for layout in parsed.values()}) < len(names):
        raise ConfigError(f"--layouts names a layout twice: {layouts}", param="--layouts")
    made = [Deployment(name, str(layout), layout.device_count, flags=tuple(flags)) for name, layout in parsed.items()]
    for count in sorted({one.devices for one in made}) if vllm else ():
        name = "plain vLLM" if count == 1 else f"plain vLLM x{count}"
        made.append(Deployment(name, str(parse(f"TP1x{count}")), count, ServedBy.VLLM, tuple(vllm_flags)))
    for peer in peers:
        driven = [one for one in made if not one.baseline and parsed[one.name].roles == {Role.E, Role.PD}]
        if not driven:
            raise ConfigError(f"--{peer}: no layout of {layouts} is one for it: {WHY_NO_PEER}", param=f"--{peer}")
        made += [replace(one, name=f"{PEERS[peer].title} over {one.name}", served_by=peer) for one in driven]
    return _with_slugs(made)


def _servable(name: str) -> Layout:
    layout = parse(name)
    check_servable(layout)
    return layout


def _with_slugs(made: Sequence[Deployment]) -> tuple[Deployment, ...]:
    """Each with a folder of its own: its name, with _ for what a file name should not have."""
    slugs: list[str] = []
    for one in made:
        base = _UNSAFE.sub("_", one.name)
        same = sum(slug == base or slug.startswith(f"{base}.") for slug in slugs)
        slugs.append(f"{base}.{same + 1}" if same else base)
    return tuple(replace(one, slug=slug) for one, slug in zip(made, slugs, strict=True))
