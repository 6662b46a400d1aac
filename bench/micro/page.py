"""`epd-bench page`: what open tabs of the page cost the processes that serve it, over simulated stages.

Tabs are connections that read `/page/events`, as the page does. CPU time is of front door, controller, agent and their
parent together, by the kernel's accounts; a turn with tabs is held against turns without any, in an order drawn for
each round. `idle`: nothing else is asked. `loaded`: so many requests a second are answered meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import urlsplit

from bench.clients.process import SenderProcess
from bench.clients.sender import Flow
from bench.micro.measurement import Goal, Measurement, Row, Usually, flag, in_turns, whole
from bench.micro.proxy.rivals import text_request
from bench.micro.rows import grouped, median
from bench.served import Served, simulated
from bench.workloads.requests import Poisson, arrivals_within
from deploy.agent.cpu_time import cpu_seconds, since
from deploy.memory.placement_table import table
from epd_serve.errors import EpdError

LAYOUT = "2E-2P-2D"
RATE_RPS = 20.0
SETTLE_S = 2.0
LOADS = ("idle", "loaded")
READ_BYTES = 1 << 16
FLAGS = {"--tabs": flag("open tabs", 20, whole(1, 200))}


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """A row per turn: with tabs and without, idle and loaded."""
    with SenderProcess() as sender, simulated(LAYOUT) as launch:
        kinds = [(load, tabs) for load in LOADS for tabs in (0, arguments.tabs)]
        for turn, (load, tabs) in in_turns(kinds, arguments.rounds, shown="page"):
            with _tabs(launch, tabs) as read:
                time.sleep(SETTLE_S)
                before, read_before, begun = cpu_seconds(launch.cpu_parts), sum(read), time.monotonic()
                if load == "loaded":
                    dues = arrivals_within(Poisson(RATE_RPS), arguments.seconds, seed=turn)
                    sender.run(launch.url, Flow([text_request(launch.model, stream=True)], dues=dues))
                time.sleep(max(0.0, begun + arguments.seconds - time.monotonic()))
                wall_s = time.monotonic() - begun
                spent = since(before, cpu_seconds(launch.cpu_parts))["proxy"]
                bytes_per_s = (sum(read) - read_before) / wall_s
                if tabs and not bytes_per_s:
                    raise EpdError("the page's events do not come: nothing was measured")
            yield {
                "round": turn, "load": load, "tabs": tabs, "core_share": spent / wall_s, "bytes_per_s": bytes_per_s
            }  # fmt: skip


@contextlib.contextmanager
def _tabs(launch: Served, count: int) -> Iterator[list[int]]:
    """So many connections that are told everything; how many bytes each has read so far."""
    address = urlsplit(launch.url)
    read = [0] * count
    with contextlib.ExitStack() as stack:
        readers = []
        for tab in range(count):
            connection = stack.enter_context(socket.create_connection((address.hostname, address.port), timeout=30))
            connection.sendall(f"GET /page/events HTTP/1.1\r\nhost: {address.netloc}\r\n\r\n".encode())
            readers.append(threading.Thread(target=_read, args=(connection, read, tab), daemon=True))
        for reader in readers:
            reader.start()
        yield read


def _read(connection: socket.socket, read: list[int], tab: int) -> None:
    with contextlib.suppress(OSError):  # closed at the end of the turn
        while chunk := connection.recv(READ_BYTES):
            read[tab] += len(chunk)


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """`page_core_share`: of a core, that the tabs add, idle; the same under load."""
    by = grouped(rows, "load", "round")

    def added(load: str) -> float:
        rounds = [own for (of, _), own in by.items() if of == load and len({row["tabs"] > 0 for row in own}) == 2]
        return statistics.median(
            median([row for row in own if row["tabs"]], "core_share")
            - median([row for row in own if not row["tabs"]], "core_share")
            for own in rounds
        )

    return {
        "page_core_share": round(added("idle"), 5),
        "page_core_share_loaded": round(added("loaded"), 5),
        "page_tab_bytes_per_s": round(median([row for row in rows if row["tabs"]], "bytes_per_s") / rows_tabs(rows)),
    }


def rows_tabs(rows: Sequence[Row]) -> int:
    """How many tabs there were in the turns with some."""
    return int(max(row["tabs"] for row in rows))


def tables(rows: Sequence[Row]) -> Iterable[str]:
    head = ("load", "tabs", "of a core", "KB/s")
    cells = [
        (load, str(tabs), f"{median(own, 'core_share'):.4f}", f"{median(own, 'bytes_per_s') / 1000:.1f}")
        for (load, tabs), own in sorted(grouped(rows, "load", "tabs").items())
    ]
    return [table([head, *cells])]


MEASUREMENT = Measurement(
    quick="shorter turns, fewer rounds",
    flags=FLAGS,
    settings={"rounds": Usually(5, 2), "seconds": Usually(15.0, 6.0)},
    about=lambda arguments: {"kind": f"real front door and controller; {LAYOUT} of simulated stages"},
    measure=measure,
    figures=figures,
    tables=tables,
    goals=(Goal("page_core_share", "<=", 0.01, "20 open tabs are not to be noticed"),),
)
add_arguments = MEASUREMENT.add_arguments
