"""Variables that make a deployment fail in ways that do not look like them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deploy.doctor.check import Level
from tests.deploy.doctor.machines import CPU, NPU, found


@pytest.mark.parametrize(
    ("variables", "level"),
    [
        ({}, Level.OK),
        ({"http_proxy": "set"}, Level.WARNING),
        ({"HTTP_PROXY": "set", "no_proxy": "example.com"}, Level.WARNING),
        ({"HTTP_PROXY": "set", "NO_PROXY": "example.com, 127.0.0.1"}, Level.OK),
        ({"all_proxy": "set", "no_proxy": "localhost"}, Level.OK),
    ],
)
def test_a_proxy_that_would_be_asked_for_loopback_is_warned_of(variables: dict[str, str], level: Level) -> None:
    one = found(replace(CPU, environment=variables), "http proxies")
    assert one.level is level
    assert level is Level.OK or "no_proxy=127.0.0.1" in one.fix


def test_a_scheduler_of_vllm_ascends_in_the_environment_is_an_error() -> None:
    one = found(replace(NPU, environment={"VLLM_ASCEND_BALANCE_SCHEDULING": "1"}), "VLLM_ASCEND_BALANCE_SCHEDULING")
    assert one.stops and "balance scheduler" in one.seen
    off = replace(NPU, environment={"VLLM_ASCEND_BALANCE_SCHEDULING": "0"})
    with pytest.raises(ValueError, match="not enough values"):
        found(off, "VLLM_ASCEND_BALANCE_SCHEDULING")
