"""SIGTERM to a proxy in a process of its own, with a request in flight."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from deploy.host.ports import free_ports
from tests.deploy.alone.test_proxy import wait_health
from tests.deploy.alone.test_stages import stages_file
from tests.deploy.launched import DEADLINE_S, REPOSITORY
from tests.waiting import wait_for

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
HEADERS = {"content-type": "application/json"}


class SlowStage(ThreadingHTTPServer):
    """Answers /health at once and everything else when `released`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked, self.released = threading.Semaphore(0), threading.Event()


class _Handler(BaseHTTPRequestHandler):
    server: SlowStage

    def do_GET(self) -> None:
        self._answer(b"{}")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.release()
        self.server.released.wait(DEADLINE_S)
        self._answer(b'{"object": "chat.completion", "choices": []}')

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: object) -> None:
        pass


@contextmanager
def slow_stage() -> Iterator[SlowStage]:
    with SlowStage() as stage:
        thread = threading.Thread(target=stage.serve_forever)
        thread.start()
        try:
            yield stage
        finally:
            stage.released.set()
            stage.shutdown()
            thread.join()


def ask(port: int) -> tuple[int, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    connection.request("POST", "/v1/chat/completions", BODY, HEADERS)
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status, response.headers


def metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as answer:
        return str(answer.read().decode())


def test_sigterm_first_says_not_ready_then_refuses_and_lets_those_in_flight_finish(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    with slow_stage() as stage:
        text = f"model: m\nstages: [{{id: PD0, role: PD, url: 'http://127.0.0.1:{stage.server_port}'}}]\n"
        argv = [sys.executable, "-m", "deploy.cli", "proxy", "--stages", stages_file(tmp_path, text)]
        proxy = subprocess.Popen(
            [*argv, "--port", str(port), "--lame-duck-s", "600", "--run-root", str(tmp_path / "run")],
            env={**os.environ, "PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            wait_health(port, 200)
            answers: list[int] = []
            client = threading.Thread(target=lambda: answers.append(ask(port)[0]))
            client.start()
            assert stage.asked.acquire(timeout=DEADLINE_S)
            proxy.send_signal(signal.SIGTERM)
            wait_health(port, 503)
            late = threading.Thread(target=lambda: answers.append(ask(port)[0]))
            late.start()  # load balancers may not have noticed yet
            assert stage.asked.acquire(timeout=DEADLINE_S)
            proxy.send_signal(signal.SIGTERM)  # enough of that
            wait_for(lambda: "epd_proxy_draining 1.0" in metrics(port))
            status, headers = ask(port)
            assert status == 503 and int(headers["retry-after"]) >= 1 and headers["connection"] == "close"
            assert proxy.poll() is None
            stage.released.set()
            client.join()
            late.join()
            assert answers == [200, 200]
            _, err = proxy.communicate(timeout=DEADLINE_S)
            assert proxy.returncode == 0, err
            assert "accepted for 600 s, or until another SIGTERM" in err
            assert re.search(r"draining: [12] requests may go on for 30 s", err), "as of a moment ago"
        finally:
            proxy.kill()
            proxy.wait()
