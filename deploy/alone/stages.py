"""The stages that somebody else runs, as a proxy before them is told: by a file, or by one flag for each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from epd_serve.endpoint import for_http, is_endpoint, socket_path
from epd_serve.errors import ConfigError
from epd_serve.instances import Instance
from epd_serve.roles import Role
from epd_serve.suggestions import unknown

STATIC = "static"
"""The incarnation of an instance whose lives nobody tells apart."""

LISTED = (Role.EPD, Role.PD, Role.E)
"""Roles for which an address is enough. What E has made its answers say; P and D meet at addresses of their own."""

_SAID_BY_OTHERS = {"core_share", "cores"}
"""What a launcher says of an instance, and nobody writes by hand."""


@dataclass(frozen=True)
class GivenStages:
    """What a proxy is told of them.

    Attributes:
        model: the name that clients use. revision, dtype: they enter the keys of features.
        instances: without `kv_news` of P the proxy knows nothing of KV links and waits for none, without `load_news` it
            goes by what it has in flight.
    """

    model: str
    instances: tuple[Instance, ...]
    revision: str = ""
    dtype: str = ""


def given_stages(file: str | None, listed: Sequence[str], model: str) -> GivenStages:
    """Of the flags `--stages` (a file), or `--stage` (each one) and `--served-model-name`.

    Raises:
        ConfigError: both or neither are given, or what is wrong in them.
    """
    if bool(file) is bool(listed):
        raise ConfigError("proxy needs --stages FILE.yaml, or --stage [ROLE=]URL for each stage", param="--stages")
    if not file:
        return listed_stages(listed, model)
    if model:
        raise ConfigError("the file of --stages names the model: drop --served-model-name", param="--served-model-name")
    return read_stages_file(file)


def listed_stages(words: Sequence[str], model: str) -> GivenStages:
    """Of `PD=http://10.0.0.4:8100` and the like; a URL alone is a stage that runs all of a model.

    Raises:
        ConfigError: names the word and the fix.
    """
    if not model:
        raise ConfigError("--stage needs --served-model-name NAME: what clients call the model", param="--stage")
    instances: list[Instance] = []
    for word in words:
        role, url = _role_and_url(word)
        if any(one.url == url for one in instances):
            raise ConfigError(f"--stage {word}: {url} is given twice", param="--stage")
        number = sum(one.role is role for one in instances)
        instances.append(Instance(f"{role.value}{number}", role, url, STATIC, node=_node(url)))
    roles = {one.role for one in instances}
    if Role.E in roles and Role.PD not in roles:
        raise ConfigError("--stage E=URL encodes for others: give a --stage PD=URL, too", param="--stage")
    return GivenStages(model, tuple(instances))


def _role_and_url(word: str) -> tuple[Role, str]:
    role, equals, url = ("EPD", "=", word) if is_endpoint(word) else word.partition("=")
    if not (equals and is_endpoint(url)):
        raise ConfigError(f"--stage {word!r} is not [ROLE=]http://HOST:PORT or [ROLE=]unix:/PATH", param="--stage")
    if role not in set(Role):
        raise ConfigError(f"--stage {word}: {unknown('role', role, LISTED)}", param="--stage")
    if Role(role) not in LISTED:
        raise ConfigError(
            f"--stage {word}: {role} works with other stages, at addresses that only a file can tell: "
            "--stages FILE.yaml, or leave all of it to epd-serve serve",
            param="--stage",
        )
    return Role(role), url.rstrip("/")


def read_stages_file(path: str) -> GivenStages:
    """Parse and check a file with `model`, optional `revision` and `dtype`, and `stages`: mappings of `Instance` with
    id, role, url; incarnation and addresses as in the stage's wiring.

    Raises:
        ConfigError: names the entry and the fix.
    """
    import yaml

    try:
        raw = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        return _given(raw)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ConfigError, msgspec.ValidationError) as error:
        raise ConfigError(f"stages file {path}: {' '.join(str(error).split())}", param="--stages") from error


def _given(raw: Any) -> GivenStages:
    """Raises ConfigError, ValidationError."""
    if not isinstance(raw, dict) or not isinstance(raw.get("stages"), list) or "model" not in raw:
        raise ConfigError("it needs `model: NAME` and a list `stages:`")
    _check_keys(raw, {"model", "stages", "revision", "dtype"})
    instances = tuple(_instance(entry) for entry in raw["stages"])
    if len({one.id for one in instances}) != len(instances) or not instances:
        raise ConfigError("stages need distinct ids, and at least one")
    return GivenStages(str(raw["model"]), instances, str(raw.get("revision", "")), str(raw.get("dtype", "")))


def _instance(entry: Any) -> Instance:
    """Raises ConfigError, ValidationError."""
    if not isinstance(entry, dict) or not {"id", "role", "url"} <= set(entry):
        raise ConfigError(f"a stage needs id, role and url: {entry!r}")
    _check_keys(entry, {field.name for field in fields(Instance)} - _SAID_BY_OTHERS)
    if str(entry["role"]) not in set(Role):
        raise ConfigError(unknown("role", str(entry["role"]), set(Role)))
    url = str(entry["url"])
    if not is_endpoint(url):
        raise ConfigError(f"url {url!r} is neither http://HOST:PORT nor unix:/PATH")
    words = {"id": str(entry["id"]), "incarnation": str(entry.get("incarnation", STATIC))}  # YAML has numbers, too
    node = entry.get("node") or _node(url)
    return msgspec.convert({**entry, **words, "url": url.rstrip("/"), "node": node}, Instance)


def _check_keys(raw: Mapping[Any, Any], valid: Collection[str]) -> None:
    for key in raw:
        if key not in valid:
            raise ConfigError(unknown("key", str(key), valid))


def _node(url: str) -> str:
    return "local" if socket_path(url) else for_http(url).hostname or ""
