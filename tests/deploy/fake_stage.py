"""A stage without vLLM: answers /health, logs like a start, and dies, hangs or fails on demand.

argv: PORT|PATH [--host ADDRESS] [--fail TEXT] [--delay S] [--child] [--ignore-term] [--unhealthy-file PATH]
           [--links STATE] [--wiring JSON] [--once PATH]

With the wiring of a stage that sends KV it reports links to its peers, all of them in STATE. With a core order in its
environment it pins itself to its cores and says so, as a worker on CPU does. What stands at `--once` are more flags, of
the first life that runs from then on.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socketserver
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("where", help="a port, or the path of a Unix socket")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--fail", default="")
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--unhealthy-file", default="")
    parser.add_argument("--links", default="up")
    parser.add_argument("--wiring", default="")
    parser.add_argument("--once", default="")
    args = parser.parse_args()
    if args.once and Path(args.once).exists():
        args = parser.parse_args([*sys.argv[1:], *shlex.split(Path(args.once).read_text())])
        Path(args.once).unlink()
    print(
        "(EngineCore pid=7) INFO 11-21 03:44:25 [core.py:1] Initializing a V1 LLM engine (v0) with config", flush=True
    )
    if args.fail:
        print(f"(EngineCore pid=7) ERROR 11-21 03:44:25 [core.py:9] ValueError: {args.fail}", flush=True)
        sys.exit(1)
    if args.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.child:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "epd_serve child"])
    if "EPD_SERVE_CORE_SHARE" in os.environ:
        obey_core_order(os.environ["EPD_SERVE_CORE_SHARE"])
    if args.wiring:
        threading.Thread(target=report_links, args=(json.loads(args.wiring), args.links), daemon=True).start()
    time.sleep(args.delay)

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            sick = args.unhealthy_file and Path(args.unhealthy_file).exists()
            self.send_response(503 if sick else 200)
            self.send_header("X-Pid", str(os.getpid()))
            self.end_headers()

        def log_message(self, format: str, *values: object) -> None:
            pass

    on_tcp = args.where.isdigit()
    server = ThreadingHTTPServer((args.host, int(args.where)), Health) if on_tcp else OnSocket(args.where, Health)
    print("INFO:     Application startup complete.", flush=True)
    server.serve_forever()


class OnSocket(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


def obey_core_order(text: str) -> None:
    from npu_ops.core_grants import CoreGrant, CoreOrder, write_grant

    order = CoreOrder.from_json(text)
    os.sched_setaffinity(0, order.cores)
    found = tuple(sorted(os.sched_getaffinity(0)))
    write_grant(order.report, CoreGrant(0, order.share, {"cpu": len(found)}, core_ids=found))


def report_links(raw: dict[str, Any], state: str) -> None:
    """As the worker of rank 0 does."""
    import zmq

    from epd_serve import wire
    from epd_serve.peers import Peers
    from epd_serve.wiring import StageWiring, worker_endpoint

    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        address = worker_endpoint(raw["kv_publish"], 0)
        socket.bind(address)
        peers = Peers(StageWiring.from_json(raw))
        peers.changed()
        links = [wire.KvLink(workers[0], 0, state) for workers in peers.takers_of_kv()]
        report = wire.KvReport(raw["instance"], raw["incarnation"], 0, raw["kv_grouping"], 0.0, links)
        while True:
            socket.send(wire.encode(report))
            time.sleep(0.1)


if __name__ == "__main__":
    main()
