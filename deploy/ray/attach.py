"""The operator's end: begins a deployment on the cluster and shows how it is going; asks one that runs.

A deployment goes on without whoever has begun it. SIGINT and SIGTERM are passed on to it, as to a launch of this
machine; with a kill, or without its terminal, whoever shows it leaves it alone, and so it does with the third signal. A
controller that has not heard them by then is followed by another one, which finds them noted.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy.host.environment import is_terminal
from deploy.host.started import ENDS
from deploy.launch.life import checked_keys
from deploy.launch.screen import Screen
from deploy.options.config import DeployConfig
from deploy.ray.cluster import (
    ANSWER_S,
    NAMESPACE,
    Actor,
    connect,
    controller_name,
    controller_of,
    deployments,
    here,
    node_name,
    question_of,
    require_token,
)
from deploy.ray.controller import SIGNALS, Asked, ControllerActor
from deploy.ray.news import Event, show
from deploy.ray.notes import write_note
from epd_serve.errors import ConfigError, EpdError

NEWS_S = 10.0
ENOUGH, LEFT = 3, 130
"""So many signals end this end of it, whatever the cluster does; its exit code then."""

HEARD_S, LEAVE_S = 3.0, 10.0
"""For a controller to answer to signals, and then for the cluster's head to have another one follow it."""

TICK_S = 1.0
RETRY_S = 0.2


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
    files = ("api_key_file", "tls_cert_file", "tls_key_file")  # who reads them may run in another folder
    found: dict[str, Any] = {name: getattr(config, name) for name in files}
    found = {name: str(Path(file).resolve()) for name, file in found.items() if file}
    config = replace(config, **found)
    begin = Asked(config, here(), checked_keys(config.api_key_file))
    return asyncio.run(_Attached(config.name).until_ended(begin=begin, detach=detach))


@contextlib.contextmanager
def operator(name: str = "", address: str = "") -> Iterator[httpx.Client]:
    """Asks the controller of a deployment what `deploy/control/routes.py` answers, from any node of the cluster.

    Raises:
        ConfigError: no cluster, no such deployment, or several. EpdError: another version of this program runs it.
    """
    connect(address)
    _, actor = controller_of(name)
    with httpx.Client(transport=_ThroughActor(actor), base_url="http://deployment", timeout=ANSWER_S) as http:
        yield http


def end_on_ray(name: str = "", address: str = "", *, now: bool = False) -> int:
    """Ends a deployment, once its requests have ended or, with `now`, at once; returns when it has gone."""
    connect(address)
    found, actor = controller_of(name)
    attached = _Attached(found, actor)
    attached.send(signal.SIGINT if now else signal.SIGTERM)
    return asyncio.run(attached.until_ended(from_now=True))


def log_reader(name: str, node: str, log: str) -> Callable[[int], tuple[bytes, int]]:
    """As `deploy.host.logs.read_log`, of a node of the deployment. To be called while we are connected."""
    actor = ray.get_actor(node_name(controller_of(name)[0], node), namespace=NAMESPACE)

    def read(offset: int) -> tuple[bytes, int]:
        try:
            told: tuple[bytes, int] = ray.get(actor.log.remote(log, offset), timeout=ANSWER_S)
        except RayError as error:
            raise EpdError(f"node {node} does not answer: {error}") from error
        return told

    return read


class _Attached:
    """A terminal that shows a deployment.

    Args:
        actor: its controller, if there is one yet.
    """

    def __init__(self, name: str, actor: Actor = None) -> None:
        self._name = name
        self._down = f"epd-serve down --ray --name {name} ends it"
        self._actor = actor
        self._screen = Screen(sys.stderr, terminal=is_terminal())
        self._sent: list[int] = []
        self._answers: list[Any] = []
        self._enough = asyncio.Event()

    def send(self, number: int) -> None:
        """A signal, as to the process of a launch."""
        self._sent.append(number)
        self._answers.append(self._actor.signal.remote(number))

    async def until_ended(self, *, begin: Asked | None = None, detach: bool = False, from_now: bool = False) -> int:
        """Show it until its end or, detached, until it is ready.

        Args:
            begin: make its controller, and tell it this. from_now: nothing that has been before.
        """
        loop = asyncio.get_running_loop()
        for one in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(one, self._on_signal, one)
        if begin is not None:  # from here on signals are the deployment's
            self._actor = _made(self._name, begin.node)
        ticking = asyncio.create_task(self._tick())
        following = asyncio.create_task(self._follow(begin, -1 if from_now else 0, detach))
        enough = asyncio.create_task(self._enough.wait())
        try:
            await asyncio.wait((following, enough), return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                return following.result()
            end = "which has been told to end it" if self._leave() else f"which does not answer: {self._down}"
            self._screen.line(f"deployment {self._name} is left to the cluster, {end}")
            return LEFT
        finally:
            for task in (ticking, following, enough):
                task.cancel()
            self._screen.close()

    def _on_signal(self, number: int) -> None:
        self.send(number)
        if len(self._sent) >= ENOUGH:
            self._enough.set()

    def _leave(self) -> bool:
        """Whether all that was sent is heard, by the next controller if need be: what is under way ends with us."""
        done = threading.Event()

        def leave() -> None:
            with contextlib.suppress(RayError, RuntimeError):  # the cluster's head is away
                try:
                    ray.get(self._answers, timeout=HEARD_S)
                except RayError:
                    write_note(self._name, SIGNALS, msgspec.json.encode(self._sent))
                    ray.kill(self._actor, no_restart=False)
                done.set()

        threading.Thread(target=leave, daemon=True).start()  # it may wait for ever
        return done.wait(LEAVE_S)

    async def _follow(self, begin: Asked | None, number: int, detach: bool) -> int:
        if begin is not None:
            await self._begin(begin)
        life = ""
        while True:
            try:
                life, number, events = await self._actor.news.remote(life, number, NEWS_S)
            except RayError as error:
                await self._check_there(error)
                continue
            for event in events:
                code = self._take(event, detach=detach)
                if code is not None:
                    return code

    async def _begin(self, asked: Asked) -> None:
        """Raises EpdError: the controller does not begin."""
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._actor.begin.remote(asked)
        except (RayError, TimeoutError) as error:
            why = str(error) or f"no answer within {ANSWER_S:g} s"
            raise EpdError(f"the controller of {self._name} does not begin: {why}") from error

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

    async def _check_there(self, error: RayError) -> None:
        """Ray starts a controller that has died again. Raises EpdError where this one will not come."""
        if not isinstance(error, ActorUnavailableError) and self._name not in await asyncio.to_thread(deployments):
            raise EpdError(f"deployment {self._name} has gone: {error}") from error
        await asyncio.sleep(RETRY_S)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._screen.tick()


def _made(name: str, node: str) -> Actor:
    return (
        ray.remote(ControllerActor)
        .options(
            name=controller_name(name),
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
        )
        .remote(name)
    )


class _ThroughActor(httpx.BaseTransport):
    """HTTP to the application in an actor."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        asked = self._actor.ask.remote(*question_of(request), request.read())
        timeouts: dict[str, Any] = request.extensions.get("timeout", {})
        try:
            status, told, content = ray.get(asked, timeout=timeouts.get("read") or ANSWER_S)
        except GetTimeoutError as error:
            raise httpx.ReadTimeout(str(error), request=request) from error
        except ActorUnavailableError as error:  # another one follows
            raise httpx.ReadError(str(error), request=request) from error
        except RayError as error:
            raise httpx.ConnectError(str(error), request=request) from error
        return httpx.Response(status, headers=told, content=content, request=request)
