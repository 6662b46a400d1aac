"""`python -m … FEED LISTENING COUNTERS`: one proxy process of several, on inherited descriptors.

Ties its life to the launcher's; everything else it is told over the feed. Started by `proxy_workers.py` only,
which ends it by SIGINT. SIGTERM is an operator's: it ends when its requests have, and another follows.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys

from deploy.host import event_loop
from deploy.host.environment import LAUNCHER_PID_ENV
from epd_serve.lifeline import die_with_parent


def main() -> None:
    feed, listening, counters = map(int, sys.argv[1:])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # until there is something to end gracefully
    launcher = os.environ.get(LAUNCHER_PID_ENV)
    if launcher is not None:
        die_with_parent(int(launcher))
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    event_loop.run(_run(feed, listening, counters))


async def _run(feed: int, listening: int, counters: int) -> None:
    from proxy.workers.worker import WorkerSignals, run_worker

    signals = WorkerSignals()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, signals.leave.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, signals.stop.set)
    await run_worker(socket.socket(fileno=feed), socket.socket(fileno=listening), counters, signals)


if __name__ == "__main__":
    main()
