"""Why a command is not begun. Each has a code for programs, and says what would help."""

from __future__ import annotations

from typing import Any

from deploy.change.types import Shortage
from deploy.memory.placement_table import short_node
from deploy.runtime.leases import LeaseError
from epd_serve.errors import EpdError


class RefusedError(EpdError):
    """Nothing was begun. `details`: fields of the answer beside the message."""

    status = 409
    type = "refused_error"

    def __init__(self, message: str, code: str, **details: Any) -> None:
        super().__init__(message, code=code)
        self.details = details


def change_under_way(what: str, layout: str) -> RefusedError:
    return RefusedError(
        f"a change is under way ({what} to {layout}): wait for it, or go back with epd-serve undo", "change_under_way"
    )


def short(shortage: Shortage, layout: str) -> RefusedError:
    """There is no order of steps that keeps everything served and within memory."""
    fix = (
        "; --pause S lets new requests wait for up to S seconds meanwhile"
        if shortage.pause_helps
        else "; this layout does not fit here"
        if shortage.what != "last path"
        else ""
    )
    return RefusedError(
        f"{layout} cannot be reached with all requests served: {shortage_text(shortage)}{fix}",
        "shortage",
        what=shortage.what,
        where=shortage.where,
        needed_bytes=shortage.needed,
        free_bytes=shortage.free,
        blocks=list(shortage.blocks),
        pause_helps=shortage.pause_helps,
    )


def no_devices(error: LeaseError, layout: str) -> RefusedError:
    return RefusedError(f"{layout}: {error.message}", "no_devices", missing=list(error.missing), free=error.free)


def pause_too_short(needed_s: float, given_s: float) -> RefusedError:
    return RefusedError(
        f"new requests would wait for about {needed_s:.0f} s, more than the {given_s:g} s of --pause",
        "pause_too_short",
        needed_s=round(needed_s, 1),
    )


def pause_too_long(given_s: float, most_s: float) -> RefusedError:
    return RefusedError(
        f"as many requests as come now fill the queues in {most_s:.0f} s, less than the {given_s:g} s of --pause: ask "
        "for less, or give admission.text_queue, admission.media_queue and max_in_flight room by --proxy",
        "pause_too_long",
        most_s=round(most_s, 1),
    )


def shortage_text(short: Shortage) -> str:
    """What is short, in one sentence without its end."""
    if short.what == "last path":
        return f"{', '.join(short.blocks)} would have to go first, and nothing else serves {short.where}"
    if short.what == "node":
        return f"node {short_node(short.where)} is not there"
    needed, free = (f"{amount / (1 << 20):,.0f} MiB" for amount in (short.needed, short.free))
    first = f" before {', '.join(short.blocks)} has gone" if short.blocks else ""
    return f"{short.what} of {short_node(short.where)}: {needed} needed, {free} free{first}"
