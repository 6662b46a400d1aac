"""The operator's end: begins a deployment on the cluster and shows how it is going; asks one that runs.

A deployment goes on without whoever has begun it. SIGINT and SIGTERM are passed on to it, as to a launch of this
machine; with a kill, or without its terminal, whoever shows it leaves it alone, and so it does with the third signal. A
controller that has not heard them by then gives way to another one, which ends what there is.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy.host.environment import is_terminal
from deploy.host.started import ENDS
from deploy.launch.life import checked_keys
from deploy.launch.screen import Screen
from deploy.options.config import DeployConfig
from deploy.ray.cluster import (
    ANSWER_S,
    NAMESPACE,
    RETRY_S,
    Actor,
    about,
    connect,
    controller_name,
    controller_of,
    deployments,
    here,
    require_token,
)
from deploy.ray.controller import ControllerActor
from deploy.ray.news import Event, show
from deploy.runtime.secrets import NodeSecrets
from epd_serve.errors import ConfigError, EpdError

NEWS_S = 10.0
ENOUGH, LEFT = 3, 130
"""So many signals end this end of it, whatever the cluster does; its exit code then."""

HEARD_S, LEAVE_S = 3.0, 20.0
"""For a controller to answer to signals, and then for the cluster's head to have another one in its place."""

TICK_S = 1.0


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
    begin = partial(_made, replace(config, **found), here())
    return asyncio.run(_Attached(config.name, begin=begin).until_ended(detach=detach))


@contextlib.contextmanager
def operator(name: str = "", address: str = "") -> Iterator[httpx.Client]:
    """Asks the controller of a deployment what `deploy/control/routes.py` answers, from any node of the cluster.

    Raises:
        ConfigError: no cluster, no such deployment, or several. EpdError: another version of this program runs it.
    """
    connect(address)
    _, actor = controller_of(name)
    about(actor)  # what is wrong is said at once
    with httpx.Client(transport=_ToController(actor), base_url="https://deployment", timeout=ANSWER_S) as http:
        yield http


def end_on_ray(name: str = "", address: str = "", *, now: bool = False) -> int:
    """Ends a deployment, once its requests have ended or, with `now`, at once; returns when it has gone."""
    connect(address)
    found, actor = controller_of(name)
    attached = _Attached(found, actor)
    return asyncio.run(attached.until_ended(signal.SIGINT if now else signal.SIGTERM, from_now=True))


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
        except EpdError as error:
            raise httpx.ConnectError(str(error), request=request) from error
        except httpx.TransportError:
            self._there = None
            raise


class _Attached:
    """A terminal that shows a deployment.

    Args:
        actor: its controller, if there is one yet.
    """

    def __init__(self, name: str, actor: Actor = None, begin: Callable[..., Actor] | None = None) -> None:
        self._name = name
        self._down = f"epd-serve down --ray --name {name} ends it"
        self._actor = actor
        self._begin = begin
        self._screen = Screen(sys.stderr, terminal=is_terminal())
        self._sent: list[int] = []
        self._told: list[asyncio.Task[None]] = []
        self._enough = asyncio.Event()
        self._reached = asyncio.Event()
        self._http: httpx.AsyncClient | None = None

    def send(self, number: int) -> None:
        """A signal, as to the process of a launch."""
        self._sent.append(number)
        self._told.append(asyncio.create_task(self._tell(number)))

    async def _tell(self, number: int) -> None:
        while True:
            await self._reached.wait()
            assert self._http is not None, "it has been reached"
            with contextlib.suppress(httpx.TransportError):
                await self._http.post("/signals", content=str(int(number)))
                return
            await asyncio.sleep(RETRY_S)

    async def until_ended(self, first: int = 0, *, detach: bool = False, from_now: bool = False) -> int:
        """Show it until its end or, detached, until it is ready.

        Args:
            first: a signal that is sent at once. from_now: nothing that has been before.
        """
        loop = asyncio.get_running_loop()
        for one in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(one, self._on_signal, one)
        if self._begin is not None:  # from here on signals are the deployment's
            self._actor = self._begin()
        if first:
            self.send(first)
        ticking = asyncio.create_task(self._tick())
        following = asyncio.create_task(self._follow(-1 if from_now else 0, detach))
        enough = asyncio.create_task(self._enough.wait())
        try:
            await asyncio.wait((following, enough), return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                return following.result()
            end = "which has been told to end it" if await self._leave() else f"which does not answer: {self._down}"
            self._screen.line(f"deployment {self._name} is left to the cluster, {end}")
            return LEFT
        finally:
            for task in (ticking, following, enough, *self._told):
                task.cancel()
            if self._http is not None:
                await self._http.aclose()
            self._screen.close()

    def _on_signal(self, number: int) -> None:
        self.send(number)
        if len(self._sent) >= ENOUGH:
            self._enough.set()

    async def _leave(self) -> bool:
        """Whether all that was sent is heard, or another controller ends it: what is under way ends with us."""
        if not (await asyncio.wait(self._told, timeout=HEARD_S))[1]:
            return True
        done = threading.Event()

        def replaced() -> None:
            until = time.monotonic() + LEAVE_S
            with contextlib.suppress(RayError, RuntimeError):  # the cluster's head is away
                ray.kill(self._actor)
                while time.monotonic() < until:
                    with contextlib.suppress(ValueError):  # its name is not free yet
                        _made(DeployConfig(name=self._name), here(), ends=True)
                        return done.set()
                    time.sleep(RETRY_S)

        threading.Thread(target=replaced, daemon=True).start()  # it may wait for ever
        return await asyncio.to_thread(done.wait, LEAVE_S)

    async def _follow(self, number: int, detach: bool) -> int:
        life = ""
        while True:
            try:
                http = await self._reach()
                asked: dict[str, str | float] = {"life": life, "after": number, "wait_s": NEWS_S}
                answer = (await http.get("/news", params=asked)).raise_for_status()
                life, number, events = msgspec.json.decode(answer.content, type=tuple[str, int, list[Event]])
            except ConfigError:
                raise
            except (EpdError, httpx.HTTPError) as error:
                await self._check_there(error)
                continue
            for event in events:
                code = self._take(event, detach=detach)
                if code is not None:
                    return code

    async def _reach(self) -> httpx.AsyncClient:
        """The controller, wherever it is now. Raises EpdError."""
        if self._http is None:
            address, folder = await asyncio.to_thread(about, self._actor, HEARD_S)
            self._http = NodeSecrets(folder, "--node-secrets").client(address, NEWS_S + ANSWER_S)
            self._reached.set()
        return self._http

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
            case _:
                show(event, self._screen)
        return None

    async def _check_there(self, error: Exception) -> None:
        """Ray starts a controller that has died again. Raises EpdError where this one will not come."""
        self._reached.clear()
        if self._http is not None:
            await self._http.aclose()
            self._http = None
        if self._name not in await asyncio.to_thread(deployments):
            raise EpdError(f"deployment {self._name} has gone: {error}") from error
        await asyncio.sleep(RETRY_S)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._screen.tick()


def _made(config: DeployConfig, node: str, ends: bool = False) -> Actor:
    """Its controller. No secret is in what Ray is told."""
    return (
        ray.remote(ControllerActor)
        .options(
            name=controller_name(config.name),
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
        )
        .remote(msgspec.json.encode(config).decode(), node, ends)
    )
