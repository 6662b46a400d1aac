"""`python -m … FEED ROW LISTENING COUNTERS`: one front door, a path, a row of the counters, inherited descriptors.

Ties its life to the launcher's; everything else it is told over the feed. Started by `lives.py` only, which ends it by
SIGINT. SIGTERM is an operator's: it ends when its requests have, and another follows.
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
from epd_serve.lifeline import die_with_parent


def main() -> None:
    feed = Path(sys.argv[1])
    row, listening, counters = map(int, sys.argv[2:])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # until there is something to end gracefully
    launcher = os.environ.get(LAUNCHER_PID_ENV)
    if launcher is not None:
        die_with_parent(int(launcher))
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    event_loop.run(_run(feed, row, listening, counters))


async def _run(feed: Path, row: int, listening: int, counters: int) -> None:
    from proxy.workers.worker import WorkerSignals, run_worker

    signals = WorkerSignals()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, signals.leave.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, signals.stop.set)
    await run_worker(feed, row, socket.socket(fileno=listening), counters, signals)


if __name__ == "__main__":
    main()
