"""Forks stages on request. No vLLM, no torch: whatever a stage needs of them has been imported by then.

A stage's root is forked twice, so that it is an orphan: it comes to the root of the launch (the nearest process that
takes in orphans), which collects it whoever else ends meanwhile, the template among them.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable

from epd_serve.engine.template.context import RootContext, be_forked_process
from epd_serve.engine.template.fresh import begin_afresh, native_environment, obey_openmp
from epd_serve.engine.template.messages import API_SERVER_NAME, GO, NOT_BEGUN, NUMBER, StageRequest, receive_request
from epd_serve.engine.template.stage_root import StageRoot
from epd_serve.lifeline import die_with_parent, name_process
from epd_serve.packets import packet_pair

ORPHANED_S = 1.0
"""Within which it is a child of the launch's root."""


def listen(path: str) -> socket.socket:
    """The socket there, which is whole from when it has its name."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(unnamed := f"{path}.new")
    listening.listen()
    os.rename(unnamed, path)
    return listening


def serve(listening: socket.socket, api_server: Callable[[], int]) -> int:
    """Serve whoever connects, one after the other, until killed.

    Args:
        api_server: what the first process of a stage does, with the stage's flags in `sys.argv`.

    Returns:
        Exit code, in each process that is forked from a stage's root. They return the whole way, so that each ends as a
        program of its own would, with what has been registered for its exit.
    """
    while True:
        agent, _ = listening.accept()
        with agent:
            while (asked := _request(agent)) is not None:
                request, log, root = asked
                if _fork_twice():
                    listening.close()
                    agent.close()
                    _begin(request, log, socket.socket(fileno=root))
                    return _be_root(request, api_server)
                os.close(log)
                os.close(root)


def _request(agent: socket.socket) -> tuple[StageRequest, int, int] | None:
    """The next one; None when the agent has gone."""
    try:
        return receive_request(agent)
    except EOFError:
        return None


def _fork_twice() -> bool:
    """Whether this is the orphan. Where it cannot be made its socket is closed, which says so."""
    try:
        between = os.fork()
    except OSError:
        return False
    if between:
        os.waitpid(between, 0)
        return False
    try:
        orphan = os.fork() == 0
    except OSError:
        orphan = False
    if not orphan:
        os._exit(0)
    return True


def _begin(request: StageRequest, log: int, agent: socket.socket) -> None:
    """Lead a group, say so, and wait for the word to go on."""
    deadline = time.monotonic() + ORPHANED_S
    while os.getppid() != request.parent:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.001)
    os.setsid()  # here, and not in between: a group's number is its leader's pid
    die_with_parent(request.parent)
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    name_process(f"stage {request.instance}")
    with agent:
        try:
            agent.sendall(NUMBER.pack(os.getpid()))
            told = agent.recv(len(GO))
        except OSError:
            told = b""
    if told != GO:
        os._exit(NOT_BEGUN)


def _be_root(request: StageRequest, api_server: Callable[[], int]) -> int:
    begin_afresh({**os.environ, **request.env, **native_environment()})  # imports have added to the environment, too
    sys.argv[1:] = request.flags
    requests, RootContext.root = packet_pair()
    RootContext.native = native_environment()

    def serve_api() -> int:
        name_process(API_SERVER_NAME)
        obey_openmp()
        return api_server()

    return StageRoot(requests).run(serve_api, be_forked_process)()
