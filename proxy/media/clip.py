"""What is known of a video or an audio without decoding it. A value."""

from __future__ import annotations

from dataclasses import dataclass

MAX_PARTS = 20_000
"""Parts of one file that are looked at: a file of nothing but tiny parts must not keep a thread busy for seconds."""


@dataclass(frozen=True)
class Clip:
    """
    Attributes:
        duration_s: seconds, or None where the container does not say. pixels: width x height of its frames, likewise.
    """

    duration_s: float | None = None
    pixels: int | None = None
