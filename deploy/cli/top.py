"""`epd-serve top`: a running deployment in a terminal, again every second until `q`. `top_frame.py` draws it."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from deploy.cli.changing import DONE, get
from deploy.cli.which import Arguments, client
from deploy.options.flags import Parser
from epd_serve.errors import ConfigError

if TYPE_CHECKING:
    import httpx

    from deploy.cli.top_frame import Seen

LOOK_S = 0.25
"""How soon another size of the terminal is noticed."""

ARROWS = {b"\x1b[A": "k", b"\x1b[B": "j"}


def top_flags(parser: Parser) -> None:
    parser.add_argument("--every", type=float, default=1.0, metavar="S", help="seconds between two looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one frame, as for a pipe")


def top(arguments: Arguments) -> int:
    if not arguments["every"] > 0:
        raise ConfigError(f"--every {arguments['every']:g} is no number of seconds", param="--every")
    if arguments["once"]:
        with client(arguments) as http:
            _print_once(http)
        return DONE
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("top needs a terminal; --once prints one frame", param="--once")
    with client(arguments) as http, contextlib.suppress(KeyboardInterrupt):
        _watch(http, arguments["every"])
    return DONE


def _print_once(http: httpx.Client) -> None:
    from rich.console import Console

    from deploy.cli.top_frame import View, frame

    console = Console()
    console.print(frame(_seen(http), View(), console.width, None), no_wrap=True, crop=False)


def _watch(http: httpx.Client, every_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from deploy.cli.top_frame import View, frame, roles_of

    console, view = Console(), View()
    with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            seen, until = _seen(http), time.monotonic() + every_s
            drawn = None
            while (left_s := until - time.monotonic()) > 0:
                if drawn != console.size:
                    drawn = console.size
                    live.update(frame(seen, view, *drawn), refresh=True)
                for key in keys(min(LOOK_S, left_s)):
                    if view.press(key, roles_of(seen)):
                        return
                    drawn = None


def _seen(http: httpx.Client) -> Seen:
    from deploy.cli.top_frame import Seen

    rows = get(http, "/instances")["instances"]
    return Seen(get(http, "/deployment"), {row["id"]: row for row in rows}, get(http, "/rates"), time.time())


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Gives what asks for the keys that are pressed within some seconds: of the terminal, which shows none of them."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)

    def pressed(within_s: float) -> list[str]:
        if not select.select([fd], [], [], within_s)[0]:
            return []
        raw = os.read(fd, 64)
        return [ARROWS[raw]] if raw in ARROWS else list(raw.decode(errors="ignore"))

    try:
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
