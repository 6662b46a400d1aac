"""The load generator in a process of its own, so that what measures shares no interpreter with what is measured.

`Generator` is the measurement's end, `main` the process. Owns the words between them; loops are `bench/load.py`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.children import Child, answering, commands
from bench.client.connection import post
from bench.load import Sample, closed_loop, open_loop
from deploy import event_loop
from epd_serve.errors import StageError

PATH = "/v1/chat/completions"


@dataclass(frozen=True)
class Load:
    """What is sent: bodies in turn, in a closed loop (`at_once`) or an open one (`per_second`), for `seconds`."""

    bodies: Sequence[Mapping[str, Any]]
    seconds: float
    at_once: int = 0
    per_second: float = 0.0
    warm_up_s: float = 0.5
    seed: int = 0


class Generator:
    """A generator process. Use as a context manager."""

    def __init__(self) -> None:
        self._child = Child("bench.load_process", {})

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.stop()

    def run(self, url: str, load: Load) -> dict[str, Any]:
        """Send `load` to the server at `url`: `Sample.summary`, and `kinds` of errors.

        Raises:
            StageError: nobody listens there, or not one answer was good.
        """
        found = self._child.ask(
            load.seconds + load.warm_up_s + 120.0,
            url=url,
            bodies=list(load.bodies),
            seconds=load.seconds,
            at_once=load.at_once,
            per_second=load.per_second,
            warm_up_s=load.warm_up_s,
            seed=load.seed,
        )
        if "failed" in found:
            raise StageError(found["failed"], stage=url)
        if not found["requests"]:
            raise StageError(f"{url}: not one good answer: {found['kinds']}", stage=url)
        return found


def main() -> None:
    answer = answering()
    lines = commands()
    next(lines)  # no configuration
    for order in lines:
        try:
            sample = event_loop.run(_run(order))
        except StageError as error:
            answer(failed=error.message)
            continue
        except BaseExceptionGroup as group:
            answer(failed="; ".join(sorted({str(error) for error in group.exceptions})))
            continue
        answer(**sample.summary(), kinds=sample.errors)


async def _run(order: Mapping[str, Any]) -> Sample:
    url = order["url"]
    made = [post(url, PATH, json.dumps(body).encode()) for body in order["bodies"]]
    stream = bool(order["bodies"][0].get("stream"))

    def requests(turn: int) -> bytes:
        return made[turn % len(made)]

    if order["at_once"]:
        return await closed_loop(
            url,
            requests,
            at_once=order["at_once"],
            seconds=order["seconds"],
            stream=stream,
            warm_up_s=order["warm_up_s"],
        )
    return await open_loop(
        url, requests, per_second=order["per_second"], seconds=order["seconds"], stream=stream, seed=order["seed"]
    )


if __name__ == "__main__":
    main()
