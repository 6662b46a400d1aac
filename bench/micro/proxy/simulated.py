"""A layout of simulated stages behind the real front door: what the proxy's measurements and soak tests run on."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.scratch import scratch
from bench.served import Served, served


@contextlib.contextmanager
def simulated(layout: str, profile: Mapping[str, Any] | None = None, flags: Sequence[str] = ()) -> Iterator[Served]:
    """Serve `layout` until the context ends.

    Args:
        profile: of the stages (docs/guides/simulation.md); without one they take no time for anything.
        flags: more of `epd-serve serve`.

    Raises:
        StageError: it did not become ready.
    """
    with scratch() as folder:
        path = folder / "profile.json"
        path.write_text(json.dumps(profile or {}), encoding="utf-8")
        with served(layout, ["--engine", "sim", "--sim-profile", str(path), *flags], traced=False) as launch:
            yield launch
