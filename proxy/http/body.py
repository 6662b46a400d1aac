"""Reads a request's body: not more of it than may be, not more slowly, and of no account more than its share."""

from __future__ import annotations

import time
from contextlib import nullcontext

from starlette.datastructures import Headers
from starlette.types import Receive

from epd_serve.errors import PayloadTooLargeError
from proxy.config.settings import ProxySettings
from proxy.errors import SlowBodyError
from proxy.request.client import CancelScope
from proxy.tenants.fair_share import FairShare, MemoryReservation

_NO_BOUND = nullcontext()


class ClientLeft(Exception):
    """The client closed its connection before its body was complete."""


async def read_body(
    headers: Headers,
    receive: Receive,
    held: MemoryReservation,
    arriving: FairShare,
    settings: ProxySettings,
    *,
    is_here: bool = False,
) -> bytearray:
    """The whole body, for as long as it comes fast enough.

    Args:
        held: has the bytes of it, from before they are kept. arriving: places for the bodies that are arriving, of
            which no account gets all.
        is_here: the server has all of it already, so that nobody is waited for.

    Raises:
        ClientLeft: before the end. SlowBodyError: 408. PayloadTooLargeError: 413. BusyError, KeyLimitError: no place.
    """
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > settings.max_body_bytes:
        raise _too_large(settings.max_body_bytes)
    account = held.account
    arriving.take(account, 1)
    try:
        return await _read(receive, held, settings, is_here)
    finally:
        arriving.give_back(account, 1)


async def _read(receive: Receive, held: MemoryReservation, settings: ProxySettings, is_here: bool) -> bytearray:
    max_bytes, pace = settings.max_body_bytes, settings.body_pace
    begun, body = time.monotonic(), bytearray()  # the event loop's clock, too
    patience: CancelScope[str] | None = None if is_here else CancelScope()
    with patience or _NO_BOUND:
        while True:
            if patience is not None:
                earned_s = pace.grace_s + len(body) / pace.bytes_per_s
                patience.cancel_at(begun + min(earned_s, pace.most_s), "slow")
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            came = message.get("body", b"")
            if len(body) + len(came) > max_bytes:
                raise _too_large(max_bytes)
            held.take(len(came))
            body += came
            if not message.get("more_body", False):
                return body
    raise SlowBodyError(
        f"The request body came too slowly: {len(body):,} bytes in {time.monotonic() - begun:.0f} s; "
        f"{pace.bytes_per_s:,} bytes a second are asked for after {pace.grace_s:g} s, and all of it within "
        f"{pace.most_s:g} s."
    )


def _too_large(max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The request body is larger than {max_bytes:,} bytes.", code="body_too_large")
