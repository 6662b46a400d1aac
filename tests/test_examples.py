"""`docs/examples`: the deployment names every setting with its default; the clients are run in `tests/e2e`."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from deploy.options.config import DeployConfig, build_config
from deploy.options.proxy_overrides import apply_overrides, proxy_overrides, setting_keys
from deploy.plan.proxy_settings import slo_of_steps
from proxy.config.settings import ModelIdentity, ProxySettings

DEPLOYMENT = Path(__file__).parents[1] / "docs/examples/deployment.yaml"
# What follows from other settings: from the deployment, the model, media_root, allow_private_media and trace_dir.
FOLLOW = {
    "max_model_len",
    "stage_priorities",
    "trace_path",
    "media.allowed_local_root",
    "media.allow_private_addresses",
}
OWN_FLAGS = {"tenant_header", "shared_features", "send_pixels", "on_missing_feature", "first_token"}


def test_the_deployment_is_what_is_served_without_it() -> None:
    config = build_config({}, str(DEPLOYMENT))
    for option in fields(DeployConfig):
        if option.name != "proxy":
            assert getattr(config, option.name) == getattr(DeployConfig(), option.name), option.name
    default = ProxySettings(served_models=("m",), identity=ModelIdentity("m"))
    assert apply_overrides(default, proxy_overrides(config.proxy)) == default
    assert slo_of_steps(config) is None


def test_the_deployment_names_every_setting_that_is_not_hidden() -> None:
    named = re.findall(r"^(?:  )?(?:# )?([a-z_]+(?:\.[a-z_]+)?):(?: |$)", DEPLOYMENT.read_text(), re.MULTILINE)
    options = {option.name for option in fields(DeployConfig) if not option.metadata.get("hidden")}
    settings = set(setting_keys(ProxySettings)) - FOLLOW - OWN_FLAGS
    assert len(named) == len(set(named))
    assert set(named) == options | settings
