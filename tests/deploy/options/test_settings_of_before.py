"""All flags, and a file that names every setting, as they were at commit 8f08b99a, but for those that are withdrawn:
they say what they said then.

`before.json` has the flags, and what they came to; `before.yaml` says the same as a file. Each has a value that is not
its default.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.command import _parsers, serve_config
from deploy.options.config import DeployConfig, build_config
from deploy.plan.blueprint import draw
from deploy.plan.proxy_settings import build_proxy_settings
from proxy.config.settings import ProxyOptions
from proxy.config.tree import settings_of

HERE = Path(__file__).parent
BEFORE = json.loads((HERE / "before.json").read_text())
FILE = str(HERE / "before.yaml")


def plain(value: Any) -> Any:
    """As JSON has it."""
    if is_dataclass(value):
        return {option.name: plain(getattr(value, option.name)) for option in fields(value)}
    if isinstance(value, list | tuple | frozenset):
        return [plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def known_then(now: Any, then: Any) -> Any:
    """Of a section what it had then."""
    return {name: now[name] for name in then} if isinstance(then, dict) else now


def settings_of_its_proxy(config: DeployConfig) -> dict[str, Any]:
    """As if another machine had Mooncake."""
    blueprint = draw(replace(config, mm_store="arena", mooncake_master="", layout="E-PD", switchable=False))
    made: dict[str, Any] = plain(build_proxy_settings(replace(blueprint, config=config)))
    return made


@pytest.mark.parametrize("config", [serve_config(BEFORE["flags"]), build_config({}, FILE)], ids=["flags", "file"])
def test_every_setting_says_what_it_said(config: DeployConfig) -> None:
    then = BEFORE["effective"]
    now = plain(config)
    moved = {"media_root", "allow_private_media"}  # of the proxy's settings alone
    assert {name: now[name] for name in then["config"] if name not in moved} == {
        name: value for name, value in then["config"].items() if name not in moved
    }
    found = settings_of_its_proxy(config)
    follow = {"arena", "observed"}  # of the deployment: nobody sets them
    assert {name: known_then(found[name], value) for name, value in then["proxy"].items() if name not in follow} == {
        name: value for name, value in then["proxy"].items() if name not in follow
    }


def test_settings_of_several_nodes_say_what_they_said() -> None:
    now = plain(serve_config(BEFORE["several"]))
    assert {name: now[name] for name in BEFORE["several_changed"]} == BEFORE["several_changed"]


def test_what_follows_from_other_settings_follows_still() -> None:
    words = ["--media-root", "/usr", "--allow-private-media", "--trace-dir", "/tmp/t", "--otlp-traces-endpoint"]
    found = settings_of_its_proxy(serve_config([*words, "http://h:4318/v1/traces"]))
    then = BEFORE["derived"]
    assert {name: found["media"][name] for name in then["media"]} == then.pop("media")
    assert {name: found[name] for name in then} == then


def test_no_flag_is_gone() -> None:
    parsers = _parsers()[1]
    assert set(BEFORE["serve_flags"]) <= set(parsers["serve"].flags())
    assert set(BEFORE["proxy_command_flags"]) <= set(parsers["proxy"].flags())
    assert set(BEFORE["proxy_keys"]) <= set(settings_of(ProxyOptions))
