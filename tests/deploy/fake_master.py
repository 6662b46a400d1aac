"""A stand-in for `mooncake_master`: two ports, /health and /metrics on the second.

argv: HOST RPC_PORT METRICS_PORT [--bind HOST_OF_RPC_PORT]
"""

from __future__ import annotations

import argparse
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

METRICS = """# TYPE master_key_count gauge
master_key_count 3
master_active_clients 2
segment_allocated_bytes{segment="127.0.0.1:14027"} 1000
segment_total_capacity_bytes{segment="127.0.0.1:14027"} 4096
master_allocated_bytes 1000
master_total_capacity_bytes 4096
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("host")
    parser.add_argument("rpc_port", type=int)
    parser.add_argument("metrics_port", type=int)
    parser.add_argument("--bind", default="")
    args = parser.parse_args()
    listening = socket.create_server((args.bind or args.host, args.rpc_port))

    class Admin(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(METRICS.encode())

        def log_message(self, format: str, *values: object) -> None:
            pass

    ThreadingHTTPServer((args.host, args.metrics_port), Admin).serve_forever()
    listening.close()


if __name__ == "__main__":
    main()
