"""What is compared: names, devices, folders; and what is refused before anything starts."""

from __future__ import annotations

import msgspec
import pytest

from bench.sweep.experiment import Deployment, deployments
from epd_serve.errors import ConfigError, LayoutError

SIX = "TP1x2,(E-PD)x2,EP-D,(E-P)-D,(E-D)-P,E-P-D"


def test_deployments_are_in_the_order_given_with_the_devices_of_their_layouts():
    assert [(one.name, one.layout, one.devices) for one in deployments(SIX)] == [
        ("TP1x2", "2EPD", 2),
        ("(E-PD)x2", "(E-PD)x2", 2),
        ("EP-D", "EP-D", 2),
        ("(E-P)-D", "(E-P)-D", 2),
        ("(E-D)-P", "(E-D)-P", 2),
        ("E-P-D", "E-P-D", 3),
    ]


def test_plain_vllm_has_a_server_per_device_at_every_device_count():
    found = [one for one in deployments(SIX, vllm=True, vllm_flags=("--dtype", "bfloat16")) if one.baseline]

    assert [(one.name, one.layout, one.devices) for one in found] == [
        ("plain vLLM x2", "2EPD", 2),
        ("plain vLLM x3", "3EPD", 3),
    ]
    assert all(one.flags == ("--dtype", "bfloat16") for one in found)


def test_every_deployment_has_a_folder_of_its_own_whatever_its_name():
    slugs = [
        one.slug for one in deployments(f"{SIX},TP1,(2E-P)-D,2(E-P)-D".replace("2(E-P)-D", "(E-P)x2-D"), vllm=True)
    ]

    assert len(set(slugs)) == len(slugs)
    assert {"_E-P_-D", "E-P-D", "plain_vLLM_x2", "plain_vLLM"} <= set(slugs)
    assert all("/" not in slug and "(" not in slug for slug in slugs)


def test_a_wrong_layout_is_refused_with_a_caret_under_its_fault():
    with pytest.raises(LayoutError) as refused:
        deployments("TP1x2,(E-X)-D")
    assert str(refused.value).splitlines()[-1].index("^") == len("  (E-")
    with pytest.raises(LayoutError, match="there is no D"):
        deployments("TP1x2,E-P")


def test_a_layout_is_compared_once_whatever_it_is_called():
    for twice in ("TP1x2,2EPD", "EP-D,EP-D"):
        with pytest.raises(ConfigError, match="--layouts"):
            deployments(twice)
    with pytest.raises(ConfigError, match="no layout"):
        deployments(" , ")


def test_a_deployment_is_itself_again_when_it_is_read_from_a_file():
    for one in deployments(f"{SIX},E-PD", vllm=True, vllm_flags=("--x",)):
        assert msgspec.json.decode(msgspec.json.encode(one), type=Deployment) == one
