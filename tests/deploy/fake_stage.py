"""A stage without vLLM: answers /health, logs like a start, and dies, hangs or fails on demand.

argv: PORT [--host ADDRESS] [--fail TEXT] [--delay S] [--child] [--ignore-term] [--unhealthy-file PATH]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--fail", default="")
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--unhealthy-file", default="")
    args = parser.parse_args()
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
    time.sleep(args.delay)

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            sick = args.unhealthy_file and Path(args.unhealthy_file).exists()
            self.send_response(503 if sick else 200)
            self.send_header("X-Pid", str(os.getpid()))
            self.end_headers()

        def log_message(self, format: str, *values: object) -> None:
            pass

    server = ThreadingHTTPServer((args.host, args.port), Health)
    print("INFO:     Application startup complete.", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
