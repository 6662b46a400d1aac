"""The operator's end: begins a deployment on the cluster and shows how it is going; asks one that runs.

A deployment goes on without whoever has begun it. SIGINT and SIGTERM are passed on to it, as to a launch of this
machine; with a kill, or without its terminal, whoever shows it leaves it alone, and so it does with the third signal. A
controller that has not heard them by then is killed, and the next life of it ends what there is.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import ray

from deploy.host.environment import is_terminal
from deploy.host.started import ENDS
from deploy.launch.life import checked_keys
from deploy.launch.screen import Screen
from deploy.options.config import DeployConfig
from deploy.ray.cluster import (
    ANSWER_S,
    RETRY_S,
    Actor,
    about,
    connect,
    controller_name,
    controller_of,
    deployments,
    here,
    hired,
    require_token,
)
from deploy.ray.controller import ControllerActor
from deploy.ray.news import ASK_EVERY_S, Event
from deploy.runtime.secrets import NodeSecrets
from epd_serve.errors import ConfigError, EpdError

ENOUGH, LEFT = 3, 130
"""So many signals end this end of it, whatever the cluster does; its exit code then."""

HEARD_S, LEAVE_S = 3.0, 20.0
"""For a controller to answer to signals, and then for the cluster's head to have another one in its place."""

T = TypeVar("T")


def serve_on_ray(config: DeployConfig, *, detach: bool = False) -> int:
    """Begins the deployment and shows it until its end or, detached, until it is ready.

    Returns:
        Its exit code.

    Raises:
        ConfigError: no cluster, the name is taken, or the deployment cannot be had on this cluster.
    """
    connect(config.ray_address)
    require_token()
    if config.name in deployments():
        raise ConfigError(
            f"deployment {config.name!r} runs on this cluster: give this one another --name, or end that one "
            f"(epd-serve down --ray --name {config.name})",
            param="--name",
        )
    NodeSecrets(config.node_secrets, "--node-secrets")
    checked_keys(config.api_key_file)
    files = ("api_key_file", "tls_cert_file", "tls_key_file", "node_secrets")  # who reads them may run elsewhere
    found: dict[str, Any] = {name: getattr(config, name) for name in files}
    found = {name: str(Path(file).resolve()) for name, file in found.items() if file}
    words = msgspec.json.encode(replace(config, **found)).decode(), here()
    made = partial(hired, ControllerActor, controller_name(config.name), here(), *words, soft=True)
    return _Attached(config.name, made).until_ended(detach=detach)


@contextlib.contextmanager
def operator(name: str = "", address: str = "") -> Iterator[httpx.Client]:
    """Asks the controller of a deployment what `deploy/control/routes.py` answers, from any node of the cluster.

    Raises:
        ConfigError: no cluster, no such deployment, or several. EpdError: another version of this program runs it.
    """
    connect(address)
    _, actor = controller_of(name)
    about(actor)  # what is wrong is said at once
    with _client(actor) as http:
        yield http


def end_on_ray(name: str = "", address: str = "", *, now: bool = False) -> int:
    """Ends a deployment, once its requests have ended or, with `now`, at once; returns when it has gone."""
    connect(address)
    found, actor = controller_of(name)
    about(actor)  # what is wrong is said at once
    first = signal.SIGINT if now else signal.SIGTERM
    return _Attached(found, lambda: actor, [first], number=-1).until_ended()


def _client(actor: Actor) -> httpx.Client:
    """Asks this controller. Errors of the way there are those of httpx, or a ConfigError."""
    return httpx.Client(transport=_ToController(actor), base_url="https://deployment", timeout=ANSWER_S)


class _ToController(httpx.BaseTransport):
    """HTTPS to the controller, wherever it is now."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._there: tuple[str, NodeSecrets, httpx.HTTPTransport] | None = None

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        try:
            if self._there is None:
                address, folder = about(self._actor)
                members = NodeSecrets(folder, "--node-secrets")
                self._there = address, members, httpx.HTTPTransport(verify=members.context)
            address, members, inner = self._there
            request.url = httpx.URL(f"https://{address}").copy_with(raw_path=request.url.raw_path)
            members.show(request)
            return inner.handle_request(request)
        except ConfigError:
            raise
        except EpdError as error:
            raise httpx.ConnectError(str(error), request=request) from error
        except httpx.TransportError:
            self._there = None
            raise


class _Attached:
    """A terminal that shows a deployment. Takes the signals of this process from now on. In the main thread.

    Args:
        begun: its controller.
        first: a signal that is sent at once. number: from which event on it shows them, -1: from now on.
    """

    def __init__(self, name: str, begun: Callable[[], Actor], first: Sequence[int] = (), number: int = 0) -> None:
        self._name = name
        self._down = f"epd-serve down --ray --name {name} ends it"
        self._screen = Screen(sys.stderr, terminal=is_terminal())
        self._number = number
        self._unheard = [*first]
        self._sent = 0
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, self._send)
        self._actor = begun()

    def _send(self, number: int, _: object) -> None:
        """As to the process of a launch."""
        self._unheard.append(number)
        self._sent += 1
        if self._sent == ENOUGH:
            raise KeyboardInterrupt

    def until_ended(self, *, detach: bool = False) -> int:
        """Show it until its end or, detached, until it is ready. Returns its exit code."""
        try:
            return _begun(lambda: self._follow(detach)).result()
        except KeyboardInterrupt:
            end = "which has been told to end it" if self._leave() else f"which does not answer: {self._down}"
            self._screen.line(f"deployment {self._name} is left to the cluster, {end}")
            return LEFT
        finally:
            self._screen.close()

    def _leave(self) -> bool:
        """Whether all that was sent is heard, if need be by another controller, which ends everything."""
        if self._is_heard(HEARD_S):
            return True
        self._unheard.append(signal.SIGKILL)
        _begun(lambda: ray.kill(self._actor, no_restart=False))
        return self._is_heard(LEAVE_S)

    def _is_heard(self, within_s: float) -> bool:
        until = time.monotonic() + within_s
        while self._unheard and time.monotonic() < until:
            time.sleep(RETRY_S)
        return not self._unheard

    def _follow(self, detach: bool) -> int:
        """Have all signals heard, and show what there is, until there is an exit code. Raises what was refused."""
        life, number = "", self._number
        with _client(self._actor) as http:
            while True:
                try:
                    if told := [int(number) for number in self._unheard]:
                        http.post("/signals", json=told).raise_for_status()
                        del self._unheard[: len(told)]
                    answer = http.get("/news", params={"life": life, "after": number}).raise_for_status()
                except httpx.HTTPError as error:  # Ray starts a controller that has died again
                    if self._name not in deployments():
                        raise EpdError(f"deployment {self._name} has gone: {error}") from error
                    time.sleep(RETRY_S)
                    continue
                life, number, events = msgspec.json.decode(answer.content, type=tuple[str, int, list[Event]])
                for event in events:
                    if (code := self._take(event, detach=detach)) is not None:
                        return code
                self._screen.tick()
                time.sleep(ASK_EVERY_S)

    def _take(self, event: Event, *, detach: bool) -> int | None:
        """An exit code where there is nothing more to show."""
        match event:
            case "ready", (message,):
                ends = f"{self._down}." if detach else ENDS
                print(f"{message}{ends}", flush=True)
                return 0 if detach else None
            case "refused", (message, param, config):
                raise ConfigError(message, param=param) if config else EpdError(message)
            case "ended", (code,):
                return int(code)
            case name, values:
                getattr(self._screen, name)(*values)
        return None


def _begun(call: Callable[[], T]) -> Future[T]:
    """In a thread, which no end of this process waits for: calls of Ray may last as long as its head is away."""
    found = Future[T]()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found
