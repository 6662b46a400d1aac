"""Forks stages on request. No vLLM, no torch: whatever a stage needs of them has been imported by then."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable

from epd_serve.engine.template.context import RootContext, be_forked_process
from epd_serve.engine.template.fresh import begin_afresh, native_environment, obey_openmp
from epd_serve.engine.template.messages import API_SERVER_NAME, StageRequest, receive_request
from epd_serve.engine.template.stage_root import StageRoot
from epd_serve.lifeline import name_process


def serve(launcher: socket.socket, api_server: Callable[[], int]) -> int:
    """Serve until the launcher has gone.

    Args:
        api_server: what the first process of a stage does, with the stage's flags in `sys.argv`.

    Returns:
        Exit code: in this process, and in each that is forked from it or from one of those. They return the whole way,
        so that each ends as a program of its own would, with what has been registered for its exit.
    """
    forked = _until_forked(launcher)
    if forked is None:
        return 0
    launcher.close()
    return _be_root(*forked, api_server)


def _until_forked(launcher: socket.socket) -> tuple[StageRequest, socket.socket] | None:
    """Fork the root of a stage for each request. Returns there, with the request; None when the launcher has gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for roots here: the launcher hears of their end
    while True:
        try:
            request, log, root = receive_request(launcher)
        except EOFError:
            return None
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            for output in (1, 2):
                os.dup2(log, output)
            os.close(log)
            name_process(f"stage {request.instance}")
            return request, socket.socket(fileno=root)
        os.close(log)
        os.close(root)


def _be_root(request: StageRequest, launcher: socket.socket, api_server: Callable[[], int]) -> int:
    begin_afresh({**os.environ, **request.env, **native_environment()})  # imports have added to the environment, too
    sys.argv[1:] = request.flags
    requests, RootContext.root = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    RootContext.native = native_environment()

    def serve_api() -> int:
        name_process(API_SERVER_NAME)
        obey_openmp()
        return api_server()

    return StageRoot(launcher, requests).run(serve_api, be_forked_process)()
