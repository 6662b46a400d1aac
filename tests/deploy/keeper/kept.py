"""A keeper of two parts that do as they are told: `python kept.py FOLDER`.

Each part connects to `<folder>/<part>.sock` and answers each line of Python, which may await, with its result as JSON.
What the keeper returns is its exit code; what it says, its stderr. `<folder>/begun` names the parts that were given up,
once the others are ready. Settings: `owner=PID`, `vital=no` (the agent), and constants of the keeper.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from deploy.keeper import keeper as loop
from deploy.keeper import part
from deploy.keeper.interface import Keeper
from deploy.keeper.keeper import keep
from deploy.keeper.part import Part

FOLDER = Path(sys.argv[1])


def told(name: str) -> Callable[[Keeper], Coroutine[Any, Any, int]]:
    async def main(keeper: Keeper) -> int:
        heard: list[int] = []

        async def hear() -> None:
            async for number in keeper.signals():
                heard.append(number)

        hearing = asyncio.create_task(hear())
        scope: dict[str, Any] = {"keeper": keeper, "heard": heard, "os": os, "signal": signal, "asyncio": asyncio}
        reader, writer = await asyncio.open_unix_connection(FOLDER / f"{name}.sock", limit=1 << 24)
        while line := await reader.readline():
            code = compile(json.loads(line), "told", "eval", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            try:
                value = eval(code, scope)
                answer = {"value": (await value) if inspect.isawaitable(value) else value}
            except Exception as error:  # noqa: BLE001 - of whichever kind
                answer = {"error": type(error).__name__, "why": str(error)}
            writer.write(json.dumps(answer, default=str).encode() + b"\n")
            await writer.drain()
        hearing.cancel()
        return 0

    return main


def say(line: str) -> None:
    os.write(2, f"{line}\n".encode())


if __name__ == "__main__":
    options = dict(setting.split("=") for setting in sys.argv[2:])
    owner = os.pidfd_open(int(options.pop("owner"))) if "owner" in options else None
    vital = options.pop("vital", "yes") == "yes"
    for name, value in options.items():
        setattr(part if hasattr(part, name) else loop, name, float(value))
    owned = (FOLDER / "held").open("wb")
    with contextlib.ExitStack() as stack:
        stack.callback((FOLDER / "undone").touch)
        code = keep(
            [Part("controller", told("controller"), controls=True), Part("agent", told("agent"), vital=vital)],
            drain_s=0.5,
            say=say,
            owned=[owned],
            owner=owner,
            begun=lambda given_up: (FOLDER / "begun").write_text(" ".join(given_up)),
        )
    assert threading.active_count() == 1
    for late in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), late)
    sys.exit(code)
