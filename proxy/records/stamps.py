"""The phase stamps of a request that has ended (`--trace-dir`), made of its record: the lines that `epd_serve/phases`
joins with those of the stages. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from proxy.records.record import Record

_TOLD = {
    "received": (), "dispatched": ("path", "transfer"), "decode_sent": (), "prefilled": ("outcome",),
    "first_byte": ("stage",),
}  # fmt: skip
"""Events that are stamps as they stand, and which of their details are."""


def stamps(record: Record, keys: Sequence[str]) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """Each an event, when it happened by `time.monotonic`, and more. `keys`: of its items."""
    yield "arrived", record.clock, {"client_id": record.client_id} if record.client_id else {}
    queued_s = 0.0
    for at_s, event, details in record.events:
        t, s = record.clock + at_s, details.get("s", 0.0)
        if event in _TOLD:
            yield event, t, {name: details[name] for name in _TOLD[event] if details.get(name)}
        elif event == "encode_call":
            yield "encode_sent", t - s, {"to": details["stage"]}
            yield "encode_done", t, {"by": details["stage"], "outcome": details["outcome"]}
        elif event in ("downloaded", "encoded"):
            yield event, t, {"t0": t - s}
        elif event == "media":
            yield event, t, {"keys": list(keys)}
        elif event == "queued" and details["line"] == "serve":
            queued_s = s
        elif event == "admitted":
            yield event, t, {"t0": t - queued_s}
    yield "done", record.clock + record.total_s, {"outcome": record.outcome}
