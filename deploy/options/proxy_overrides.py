"""`--proxy media.max_bytes=1000000` to any field of the proxy's settings: parsed, checked, put in place.

Imports of `proxy` are late: `epd-serve layout` needs none of it.
"""

from __future__ import annotations

import ast
import dataclasses
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.options.suggestions import unknown
from epd_serve.errors import ConfigError

if TYPE_CHECKING:
    from proxy.config.settings import ProxySettings

_DECIDED = (
    "served_models",
    "identity",
    "roles",
    "api_keys",
    "tls_cert_file",
    "tls_key_file",
    "stage_key",
    "key_file",
    "modalities",
    "image_tokens",
    "arena",
    "processes",
    "vllm_version",
    "observed",
)
"""Fields that follow from the deployment itself."""

OWN_FLAGS = ("tenant_header", "shared_features", "send_pixels", "on_missing_feature", "first_token")
"""Fields that have a flag of their own; by --proxy they would be two answers to one question."""


def proxy_overrides(entries: Iterable[str]) -> dict[str, Any]:
    """`a.b=value` entries as nested mappings of typed values.

    Raises:
        ConfigError: no `=`, unknown key (names the nearest), or a value of the wrong type.
    """
    from proxy.config.settings import ProxySettings

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
        if not path and last in OWN_FLAGS:
            flag = "--" + last.replace("_", "-")
            raise ConfigError(f"proxy setting {key} has a flag of its own: {flag}", param="--proxy")
        hint = _scalars(owner).get(last)
        if hint is None:
            raise ConfigError(unknown("proxy setting", key, setting_keys(ProxySettings)), param="--proxy")
        target[last] = _value(key, text.strip(), hint)
    return overrides


def apply_overrides(settings: ProxySettings, overrides: dict[str, Any]) -> ProxySettings:
    """A copy with the overrides in place; their bounds are checked by the settings themselves.

    Raises:
        ConfigError: out of bounds, or needs what is not installed.
    """
    replaced = _replace(settings, overrides)
    assert isinstance(replaced, type(settings))
    if replaced.otlp_traces_endpoint:
        from proxy.traces.exporter import check_installed

        check_installed()
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
        raise ConfigError(unknown("proxy setting", key, setting_keys(owner)), param="--proxy")
    return hint


def _scalars(owner: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(owner)
    return {name: hint for name, hint in hints.items() if not dataclasses.is_dataclass(hint) and name not in _DECIDED}


def setting_keys(owner: type[Any], prefix: str = "") -> list[str]:
    """All keys that `--proxy` takes for a class of settings, those of its sections as `section.name`."""
    keys = [f"{prefix}{name}" for name in _scalars(owner)]
    for name, hint in typing.get_type_hints(owner).items():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint) and name not in _DECIDED:
            keys += setting_keys(hint, f"{prefix}{name}.")
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
