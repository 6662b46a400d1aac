"""A root with a control that does as it is told: `python controlled.py FOLDER [SETTING=VALUE…]`.

Each life connects to `<folder>/control.sock` and answers each line of Python, which may await, with its result as JSON;
what a line that begins with `!` raises is nobody's to handle. What the root returns is its exit code; what it says, its
stderr. It ends when `<folder>/why` says why. Settings: constants of `deploy/host/root.py`, and `chld=ignored`.
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
from pathlib import Path
from typing import Any

from deploy.host import processes, root
from deploy.host.root import Life, Root, crash_only, end_now

FOLDER = Path(sys.argv[1])
SOCKET, WHY, UNDONE, UNWOUND, HELD = (FOLDER / name for name in ("control.sock", "why", "undone", "unwound", "held"))


async def control(life: Life) -> int:
    """What it would do on its way out is seen by `unwound`."""
    try:
        return await crash_only(_serve(life))
    finally:
        UNWOUND.touch()


async def _serve(life: Life) -> int:
    heard: list[int] = []
    life.heed(heard.append)
    scope: dict[str, Any] = {
        "life": life,
        "children": life.children(),
        "heard": heard,
        "end_now": end_now,
        "os": os,
        "signal": signal,
        "asyncio": asyncio,
        "processes": processes,
    }
    exec(_SCOPE, scope)
    async with asyncio.TaskGroup() as group:
        reader, writer = await asyncio.open_unix_connection(SOCKET, limit=1 << 24)
        while line := await reader.readline():
            told = json.loads(line)
            if told.startswith("!"):
                group.create_task(_value(told[1:], scope))
                continue
            try:
                answer = {"value": await _value(told, scope)}
            except Exception as error:  # noqa: BLE001 - of whichever kind
                answer = {"error": type(error).__name__, "why": str(error)}
            writer.write(json.dumps(answer, default=str).encode() + b"\n")
            await writer.drain()
    return 0


async def _value(code: str, scope: dict[str, Any]) -> Any:
    value = eval(compile(code, "told", "eval", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), scope)
    return (await value) if inspect.isawaitable(value) else value


_SCOPE = """
import ctypes

async def sleeper(name, then=lambda child: None, argv=("/bin/sleep", "600")):
    def noted(child):
        life.state.write(name, f"{child.pid} {child.born_ticks}".encode())
        then(child)

    return (await children.spawn(argv, dict(os.environ), output=2, noted=noted)).pid

def found(name):
    return children.adopt(*map(int, life.state.read(name).split()))

def fail(*_):
    raise RuntimeError("a defect")
"""
"""What lines may call: starts a process and writes it down; whom an earlier life has written down."""


def say(line: str) -> None:
    os.write(2, f"{line}\n".encode())


if __name__ == "__main__":
    options = dict(setting.split("=") for setting in sys.argv[2:])
    if options.pop("chld", "") == "ignored":
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for name, value in options.items():
        assert hasattr(root, name)
        setattr(root, name, float(value))
    owned = HELD.open("wb")
    with contextlib.ExitStack() as stack:
        stack.callback((FOLDER / "left").touch)
        kept = Root(
            control,
            drain_s=0.5,
            say=say,
            was_ready=lambda sections: "ready" in sections,
            take_down=UNDONE.touch,
            owned=[owned],
            look=lambda sections: WHY.read_text() if WHY.exists() else "",
        )
        code = kept.serve()
    assert threading.active_count() == 1
    for late in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), late)
    sys.exit(code)
