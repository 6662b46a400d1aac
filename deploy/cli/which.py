"""Which deployment a command is about: a launch of this machine, or one on a Ray cluster."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.host.launches import ADMIN_SOCKET, NoLaunchError, RunningLaunch, choose_launch
from deploy.options.flags import Parser
from epd_serve.errors import ConfigError, EpdError

if TYPE_CHECKING:
    import httpx

ANSWER_S = 60.0
Arguments = dict[str, Any]
"""What the words of a command say, by name."""


def add_launch(parser: Parser) -> None:
    """Flags that say which launch of this machine is meant."""
    parser.add_argument("--launch", metavar="ID", help="which one, where several run (or the beginning of its id)")
    parser.add_argument("--run-root", dest="root", type=Path, help=argparse.SUPPRESS)


def add_which(parser: Parser) -> None:
    """Flags that say which deployment is meant."""
    add_launch(parser)
    parser.add_argument("--ray", action="store_true", help="one on the Ray cluster of this machine")
    parser.add_argument("--name", default="", help="with --ray: which one, where several run")
    parser.add_argument("--ray-address", default="", metavar="HOST:PORT", help="with --ray: another cluster's head")


def on_ray(arguments: Arguments) -> bool:
    """Whether it is one on a cluster. Raises ConfigError: it is neither fish nor fowl, or Ray is not installed."""
    for name, flag in (("name", "--name"), ("ray_address", "--ray-address")):
        if arguments[name] and not arguments["ray"]:
            raise ConfigError(f"{flag} is for a deployment on a Ray cluster: add --ray", param=flag)
    if arguments["ray"] and arguments["launch"]:
        raise ConfigError("--launch is for a launch of this machine: with --ray give --name", param="--launch")
    if arguments["ray"]:
        check_ray()
    return bool(arguments["ray"])


def check_ray() -> None:
    """Raises ConfigError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Ray is not installed here: pip install 'epd-serve[ray]'", param="--ray")


def local_launch(arguments: Arguments) -> RunningLaunch:
    """Raises ConfigError where none, or more than one, is meant."""
    try:
        return choose_launch(arguments["launch"], arguments["root"], keeps=ADMIN_SOCKET)
    except NoLaunchError as error:
        raise ConfigError(f"{error}; for one on a Ray cluster add --ray") from None


@contextlib.contextmanager
def client(arguments: Arguments) -> Iterator[httpx.Client]:
    """Asks the deployment that is meant. Raises ConfigError where there is none, EpdError when it no longer answers."""
    import httpx

    with contextlib.ExitStack() as stack:
        if on_ray(arguments):
            from deploy.ray.attach import operator

            http = stack.enter_context(operator(arguments["name"], arguments["ray_address"]))
            called = "the deployment"
        else:
            launch = local_launch(arguments)
            transport = httpx.HTTPTransport(uds=str(launch.path / ADMIN_SOCKET))
            http = httpx.Client(transport=transport, base_url="http://deployment", timeout=ANSWER_S)
            stack.enter_context(http)
            called = f"launch {launch.id}"
        try:
            yield http
        except httpx.TransportError as error:
            raise EpdError(f"{called} no longer answers, it may have ended: {error}") from None
