"""`python -m … FEED ROW OWN LISTENING COUNTERS`: one front door.

FEED and OWN are paths of sockets: where it is told everything, and where it is asked, which it makes; ROW is one of the
counters; LISTENING and COUNTERS are inherited descriptors. Started by `lives.py` only, which ends it by SIGINT. By
SIGTERM it ends when its requests have.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from deploy.host import event_loop
from deploy.host.environment import LAUNCHER_PID_ENV
from deploy.host.ports import private_socket
from epd_serve.lifeline import die_with_parent


def main() -> None:
    feed, own = Path(sys.argv[1]), Path(sys.argv[3])
    row, listening, counters = int(sys.argv[2]), int(sys.argv[4]), int(sys.argv[5])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # until there is something to end gracefully
    launcher = os.environ.get(LAUNCHER_PID_ENV)
    if launcher is not None:
        die_with_parent(int(launcher))
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    event_loop.run(_run(feed, row, own, listening, counters))


async def _run(feed: Path, row: int, own: Path, listening: int, counters: int) -> None:
    from proxy.workers.worker import WorkerSignals, run_worker

    signals = WorkerSignals()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, signals.leave.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, signals.stop.set)
    with private_socket(own) as asked:
        await run_worker(feed, row, asked, socket.socket(fileno=listening), counters, signals)


if __name__ == "__main__":
    main()
