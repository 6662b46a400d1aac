"""Reads a request's body: not more of it than may be, not more slowly, and of no account more than its share."""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import Receive

from epd_serve.errors import PayloadTooLargeError
from proxy.config.limits import BodyPace
from proxy.config.settings import ProxySettings
from proxy.errors import SlowBodyError
from proxy.request.deadline import CancelScope
from proxy.tenants.fair_share import FairShare, MemoryReservation


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
        held: has the bytes of it, from before they are kept. arriving: places for the bodies that are arriving.
        is_here: the server has all of it already, so that nobody is waited for.

    Raises:
        ClientLeft: before the end. SlowBodyError: 408. PayloadTooLargeError: 413. BusyError, KeyLimitError: no place.
    """
    max_bytes = settings.max_body_bytes
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    arriving.take(held.account, 1)
    try:
        if is_here:
            return await _read(bytearray(), receive, held, max_bytes, lambda _: None)
        return await _read_in_time(receive, held, max_bytes, settings.body_pace)
    finally:
        arriving.give_back(held.account, 1)


async def _read_in_time(receive: Receive, held: MemoryReservation, max_bytes: int, pace: BodyPace) -> bytearray:
    begun, body = time.monotonic(), bytearray()  # the event loop's clock, too
    patience: CancelScope[str] = CancelScope()

    def put_off(size_bytes: int) -> None:
        earned_s = pace.grace_s + size_bytes / pace.bytes_per_s
        patience.cancel_at(begun + min(earned_s, pace.most_s), "slow")

    with patience:
        put_off(0)
        return await _read(body, receive, held, max_bytes, put_off)
    raise SlowBodyError(
        f"The request body came too slowly: {len(body):,} bytes in "
        f"{time.monotonic() - begun:.0f} s; {pace.bytes_per_s:,} bytes a second are asked "
        f"for after {pace.grace_s:g} s, and all of it within {pace.most_s:g} s."
    )


async def _read(
    body: bytearray,
    receive: Receive,
    held: MemoryReservation,
    max_bytes: int,
    came_so_far: Callable[[int], None],
) -> bytearray:
    """`body`, with all that comes. `came_so_far`: called with its bytes, while more is to come."""
    while True:
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
        came_so_far(len(body))


def _too_large(max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The request body is larger than {max_bytes:,} bytes.", code="body_too_large")
