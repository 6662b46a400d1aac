"""What is compared: layouts and baselines, each with its name, its devices and its folder. Pure; nothing is started."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from epd_serve.errors import ConfigError
from epd_serve.layout import Layout
from epd_serve.layout_parser import parse
from epd_serve.placement import check_servable
from epd_serve.roles import Role

_UNSAFE = re.compile(r"[^A-Za-z0-9.+-]")


class How(StrEnum):
    """What serves an entry: `epd-serve serve`, plain vLLM servers, or another's example proxy over our stages."""

    LAYOUT = "layout"
    VLLM = "vllm"
    PEER_VLLM = "peer-vllm"
    PEER_ASCEND = "peer-ascend"


PEERS = {How.PEER_VLLM: "vLLM's example proxy", How.PEER_ASCEND: "vllm-ascend's example proxy"}

WHY_NO_PEER = (
    "the example proxies can drive layouts of E and PD alone, as (E-PD) or 2E-PD. Where P and D are apart they ask P "
    "with vLLM's do_remote_decode and hand its answer to D; our P and D move KV only under a transfer that our proxy "
    "opens at D first, so that D would compute every prompt again, which is not that layout"
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the comparison.

    Attributes:
        name: in every table and figure. layout: its canonical form; a plain vLLM is the layout that it is.
        devices: that it occupies. flags: of `epd-serve serve`, or of each plain vLLM.
        slug: its folder.
    """

    name: str
    layout: str
    devices: int
    how: How = How.LAYOUT
    flags: tuple[str, ...] = ()
    slug: str = ""

    @property
    def baseline(self) -> bool:
        return self.how is not How.LAYOUT

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "layout": self.layout,
            "devices": self.devices,
            "flags": list(self.flags),
            "baseline": self.baseline,
            "how": self.how.value,
            "slug": self.slug,
        }


def entries(
    layouts: str,
    *,
    flags: Sequence[str] = (),
    vllm: bool = False,
    vllm_flags: Sequence[str] = (),
    peers: Sequence[How] = (),
) -> tuple[Entry, ...]:
    """The entries in the order in which they are measured: layouts, then baselines.

    Args:
        layouts: with commas between. flags: of each.
        vllm: plain vLLM too, at every number of devices that a layout has: one server per device.
        peers: each over every layout that it can drive.

    Raises:
        LayoutError: a layout that does not parse, or cannot serve; with a caret under the fault.
        ConfigError: no layout, one of them twice, a peer that can drive none.
    """
    words = [word.strip() for word in layouts.split(",") if word.strip()]
    if not words:
        raise ConfigError("--layouts names no layout", param="--layouts")
    parsed = {word: _servable(word) for word in words}
    found = [Entry(word, str(layout), layout.device_count, flags=tuple(flags)) for word, layout in parsed.items()]
    for at, one in enumerate(found):
        for other in found[:at]:
            if other.layout == one.layout:
                raise ConfigError(f"--layouts: {other.name} and {one.name} are one layout", param="--layouts")
    if len(parsed) < len(words):
        raise ConfigError(f"--layouts names one twice: {layouts}", param="--layouts")
    if vllm:
        for count in sorted({one.devices for one in found}):
            name = "plain vLLM" if count == 1 else f"plain vLLM x{count}"
            found.append(Entry(name, str(parse(f"TP1x{count}")), count, How.VLLM, tuple(vllm_flags)))
    for how in peers:
        over = [word for word, layout in parsed.items() if drivable(layout)]
        if not over:
            flag = f"--{how.value}"
            raise ConfigError(f"{flag}: no layout of {layouts} is one for it: {WHY_NO_PEER}", param=flag)
        found += [
            Entry(f"{PEERS[how]} over {word}", str(parsed[word]), parsed[word].device_count, how, tuple(flags))
            for word in over
        ]
    return _with_slugs(found)


def drivable(layout: Layout) -> bool:
    """An example proxy can drive it: see `WHY_NO_PEER`."""
    return layout.roles == {Role.E, Role.PD}


def _servable(word: str) -> Layout:
    layout = parse(word)
    check_servable(layout)
    return layout


def _with_slugs(found: Sequence[Entry]) -> tuple[Entry, ...]:
    """Each with a folder of its own: its name, with _ for what a file name should not have."""
    named: list[Entry] = []
    for one in found:
        slug = base = _UNSAFE.sub("_", one.name)
        number = 1
        while any(other.slug == slug for other in named):
            number += 1
            slug = f"{base}.{number}"
        named.append(replace(one, slug=slug))
    return tuple(named)
