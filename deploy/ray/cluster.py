"""The cluster: how to get to it, what things of ours are called there, and what is said where something is missing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy.options.addresses import host_and_port
from epd_serve import __version__
from epd_serve.errors import ConfigError, EpdError

NAMESPACE = "epd-serve"
"""Of all actors and placement groups of ours."""

ANSWER_S, CONNECT_S, RETRY_S = 60.0, 5.0, 0.2

T = TypeVar("T")
Actor = Any
"""A handle: `actor.method.remote(…)`."""


@dataclass(frozen=True)
class RayNode:
    """A node of the cluster.

    Attributes:
        id: of Ray, new with each life of its raylet. address: as the others reach it. resources: all that it has.
    """

    id: str
    address: str
    resources: dict[str, float]


def connect(address: str = "") -> None:
    """Take part in the cluster that runs on this machine.

    Args:
        address: of its head, `HOST:PORT`; without one `RAY_ADDRESS` says it, or the cluster that runs here.

    Raises:
        ConfigError: there is none, it wants another token, or its versions are others.
    """
    if ray.is_initialized():
        return
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if address not in ("", "auto"):  # Ray would ask it for a minute
            socket.create_connection(host_and_port(address, "ray_address"), CONNECT_S).close()
        ray.init(
            address=address or "auto",
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except OSError as error:  # a ConnectionError of Ray's among them
        where = "on this machine" if address in ("", "auto") else f"at {address}"
        raise ConfigError(
            f"no Ray cluster answers {where}: start one with `ray start --head`, join it with `ray start --address "
            f"HOST:PORT`, or name it with --ray-address ({_first_line(error)})",
            param="--ray-address",
        ) from error
    except (RayError, RuntimeError, ValueError) as error:  # no token or a wrong one, another version of Ray or Python
        raise ConfigError(f"the Ray cluster cannot be used: {_first_line(error)}", param="--ray-address") from error
    finally:
        if signal.getsignal(signal.SIGTERM) is not on_sigterm:  # Ray's would end this process with exit code 15
            signal.signal(signal.SIGTERM, on_sigterm)


def require_token() -> None:
    """Of the cluster that this process takes part in: whoever reaches one without a token runs code on every node.

    Raises:
        ConfigError: it answers a caller that shows none. EpdError: it does not say whether it would.
    """
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address"]
    try:
        asked = subprocess.run(
            [*command, ray.get_runtime_context().gcs_address],
            env={**os.environ, "RAY_AUTH_MODE": "disabled"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise EpdError(f"the Ray cluster has not answered for {ANSWER_S:g} s") from error
    if asked.returncode == 0:
        raise ConfigError(
            "the Ray cluster answers callers without a token: end it (ray stop on every node), make one (umask 077; "
            "ray get-auth-token --generate), copy ~/.ray/auth_token to all nodes, and start it again with "
            "RAY_AUTH_MODE=token set everywhere",
            param="--ray-address",
        )
    if "InvalidAuthToken" not in asked.stdout:
        raise EpdError(f"the Ray cluster does not say whether it wants a token: {asked.stdout[-400:].strip()}")


def nodes_alive() -> list[RayNode]:
    """Those that are alive, in the order of their ids."""
    return sorted(
        (
            RayNode(node["NodeID"], node["NodeManagerAddress"], dict(node["Resources"]))
            for node in ray.nodes()
            if node["Alive"]
        ),
        key=lambda one: one.id,
    )


def here() -> str:
    """The node that this process is on."""
    return str(ray.get_runtime_context().get_node_id())


def controller_name(deployment: str) -> str:
    return f"epd-serve/{deployment}"


def node_name(deployment: str, node: str) -> str:
    return f"epd-serve/{deployment}/node/{node}"


def hired(kind: type, name: str, node: str, *words: str, soft: bool = False, **options: Any) -> Actor:
    """An actor of this kind that Ray keeps alive on this node. No secret is in what it is told. Waits for the cluster's
    head.

    Args:
        soft: on another one, where that has gone. options: others of the actor.
    """
    actor = ray.remote(kind).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=soft),
        **options,
    )
    return actor.remote(*words)


async def made(make: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """What this call of Ray makes. It comes to its end also when whoever waits for it is cancelled: whoever clears up
    then is to find it."""
    making = asyncio.create_task(asyncio.to_thread(make, *arguments, **options))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.wait([making])
        raise


def deployments() -> list[str]:
    """Names of those that run on the cluster."""
    named = (one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == NAMESPACE)
    found = (name.split("/")[1:] for name in named if name.startswith("epd-serve/"))
    return sorted(words[0] for words in found if len(words) == 1)


def controller_of(deployment: str = "") -> tuple[str, Actor]:
    """The controller of this deployment, or of the only one there is, and its name.

    Raises:
        ConfigError: no such deployment, or several and none is named; lists them.
        EpdError: it has just gone.
    """
    there = deployments()
    if not there:
        raise ConfigError("no deployment runs on this Ray cluster: epd-serve serve … --runtime ray", param="--name")
    if not deployment and len(there) > 1:
        raise ConfigError(f"several deployments run; name one by --name: {', '.join(there)}", param="--name")
    name = deployment or there[0]
    if name not in there:
        raise ConfigError(f"no deployment {name!r} runs on this cluster; there are: {', '.join(there)}", param="--name")
    try:
        return name, ray.get_actor(controller_name(name), namespace=NAMESPACE)
    except (RayError, ValueError) as error:
        raise EpdError(f"the controller of {name} does not answer: {_first_line(error)}") from error


def about(controller: Actor, within_s: float = ANSWER_S) -> tuple[str, str]:
    """`HOST:PORT` where it is asked, and the folder of what has to be shown there.

    Raises:
        EpdError: it does not say so, or is of another version of this program.
    """
    until, version = time.monotonic() + within_s, "of before"
    while True:
        try:
            with contextlib.suppress(AttributeError):
                address, folder, version = ray.get(controller.about.remote(), timeout=within_s)
            break
        except RayError as error:
            if not isinstance(error, ActorUnavailableError) or time.monotonic() > until:
                raise EpdError(f"the controller does not answer: {_first_line(error)}") from error
            time.sleep(RETRY_S)  # Ray starts another one
    if version != __version__:
        raise EpdError(f"the deployment runs on EPD-Serve {version}, this is {__version__}: use the same version")
    return address, folder


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
