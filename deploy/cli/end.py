"""`epd-serve logs` and `epd-serve down`: what the processes of a deployment say, and its end."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from deploy.cli.which import Arguments, client, local_launch, on_ray
from deploy.host.logs import read_log
from deploy.host.processes import signal_process
from deploy.host.rundir import HELD, is_held, is_of_this_namespace, owner_of
from deploy.options.flags import Parser
from deploy.options.mooncake import MASTER_PROGRAM
from epd_serve.errors import ConfigError, EpdError

if TYPE_CHECKING:
    import httpx

LOOK_S = 0.2
TAIL_BYTES = 16 << 10
Read = Callable[[int], tuple[bytes, int]]
"""From an offset on: a piece of a log, and where that ends."""


def logs_flags(parser: Parser) -> None:
    parser.add_argument(
        "instance",
        nargs="?",
        default="",
        metavar="INSTANCE",
        help="for example E0, or front.0 of a front door (default: all)",
    )
    parser.add_argument("-f", "--follow", action="store_true", help="go on until Ctrl-C")


def down_flags(parser: Parser) -> None:
    parser.add_argument("--now", action="store_true", help="at once: requests are cut off")


def logs(arguments: Arguments) -> int:
    wanted, follow = arguments["instance"], arguments["follow"]
    with client(arguments) as http:
        there = dict(_readers(arguments, http))
        if wanted and wanted not in there:
            raise ConfigError(f"there is no log of {wanted!r}; there are {', '.join(there)}", param="instance")
        shown = [_Log(name, read, prefixed=not wanted) for name, read in there.items() if wanted in ("", name)]
        for log in shown:
            log.show(from_end=follow and not wanted)
        while follow:
            time.sleep(LOOK_S)
            for log in shown:
                log.show()
    return 0


def _readers(arguments: Arguments, http: httpx.Client) -> Iterator[tuple[str, Read]]:
    """Of each instance, and of each other process that has a log: on several hosts that is called `NODE/NAME`."""
    status = http.get("/deployment").json()
    there = {one["id"]: (one["node"], one["id"]) for one in status["instances"]}
    for part in status["parts"]:
        node, _, log = part.rpartition("/")
        if log.startswith("front.") or log in ("template", MASTER_PROGRAM):
            there[part] = node, log
    if on_ray(arguments):
        yield from ((name, partial(_read_from, http, f"/logs/{node}/{log}")) for name, (node, log) in there.items())
    else:
        folder = local_launch(arguments).path
        yield from ((name, partial(read_log, folder / f"{log}.log")) for name, (_, log) in there.items())


def _read_from(http: httpx.Client, path: str, offset: int) -> tuple[bytes, int]:
    """As `read_log`, by the controller of several hosts. Raises EpdError."""
    answer = http.get(path, params={"offset": offset})
    if answer.is_error:
        raise EpdError(f"the log cannot be read: {answer.text}")
    return answer.content, int(answer.headers["epd-end"])


class _Log:
    """Shows what is new, in whole lines where there are several logs."""

    def __init__(self, name: str, read: Read, *, prefixed: bool) -> None:
        self._prefix = f"[{name}] ".encode() if prefixed else b""
        self._read = read
        self._offset = 0
        self._begun = b""

    def show(self, *, from_end: bool = False) -> None:
        data, self._offset = self._read(-TAIL_BYTES if from_end else self._offset)
        while data:
            *lines, self._begun = (self._begun + data).split(b"\n")
            sys.stdout.buffer.write(b"".join(self._prefix + line + b"\n" for line in lines))
            data, self._offset = self._read(self._offset)
        sys.stdout.buffer.flush()


def down(arguments: Arguments) -> int:
    now = arguments["now"]
    if on_ray(arguments):
        from deploy.ray.attach import end_on_ray

        return end_on_ray(arguments["name"], arguments["ray_address"], now=now)
    launch = local_launch(arguments)
    if not is_of_this_namespace(launch.path):
        raise EpdError(f"launch {launch.id} runs in another container: end it there")
    signal_process(owner_of(launch.path), signal.SIGINT if now else signal.SIGTERM)
    print(f"launch {launch.id} ends", flush=True)
    while is_held(launch.path / HELD):  # its root has a deadline of its own
        time.sleep(LOOK_S)
    return 0
