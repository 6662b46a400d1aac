"""Ascend's driver, CANN and packages: what fits, what does not, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deploy.doctor.check import Level
from deploy.doctor.facts import Facts
from tests.deploy.doctor.machines import NPU, found, troubles, with_packages


def with_ascend(**changed: Any) -> Facts:
    return replace(NPU, ascend=replace(NPU.ascend, **changed))


def test_a_machine_that_is_as_it_should_be_has_no_trouble() -> None:
    assert troubles(NPU) == {}


def test_missing_cann_stops_a_start_and_names_what_brings_it() -> None:
    one = found(with_ascend(home="", cann=""), "cann")
    assert (one.level, one.stops) == (Level.ERROR, True)
    assert "install CANN 9.1" in one.fix


def test_cann_that_the_shell_does_not_know_is_told_the_line_to_source() -> None:
    one = found(with_ascend(home="/usr/local/Ascend/ascend-toolkit/latest", sourced=False), "cann")
    assert one.stops
    assert one.fix == "source /usr/local/Ascend/ascend-toolkit/set_env.sh"


@pytest.mark.parametrize(
    ("cann", "driver", "level"),
    [
        ("9.1.0", "25.0.rc1.1", Level.ERROR),
        ("9.1.0", "24.1.rc3", Level.ERROR),
        ("9.1.0", "25.2.0", Level.OK),
        ("9.1.0", "26.0.RC1", Level.OK),
        ("9.1.0", "27.1.0", Level.OK),  # newer than the table: believed
        ("9.0.0", "25.0.rc1.1", Level.OK),
        ("8.5.0", "23.0.7", Level.ERROR),
        ("9.4.0", "25.2.0", Level.OK),  # newer than the table: believed
        ("8.3.RC2", "25.3.rc1", Level.WARNING),
    ],
)
def test_driver_and_cann_are_held_against_the_vendors_table(cann: str, driver: str, level: Level) -> None:
    one = found(with_ascend(cann=cann, driver=driver), "driver and cann")
    assert (one.level, one.stops) == (level, level is Level.ERROR)


def test_a_driver_of_unknown_version_is_warned_of_and_not_judged() -> None:
    facts = with_ascend(driver="")
    assert troubles(facts) == {"driver": "warning"}
    assert "version.info" in found(facts, "driver").fix


@pytest.mark.parametrize("missing", ["vllm", "vllm-ascend", "torch-npu"])
def test_a_missing_package_stops_a_start(missing: str) -> None:
    one = found(with_packages(NPU, {missing: ""}), "ascend packages")
    assert one.stops
    assert one.seen == f"not installed: {missing}"


@pytest.mark.parametrize(
    ("package", "version", "fits"),
    [
        ("vllm", "0.32.0", False),
        ("vllm", "0.23.1", True),
        ("torch-npu", "2.9.0.post2", False),
        ("torch-npu", "2.10.0", False),
        ("torch", "2.10.0+cpu", True),
        ("torch", "2.13.0", False),
    ],
)
def test_vllm_ascend_fits_one_set_of_versions(package: str, version: str, fits: bool) -> None:
    one = found(with_packages(NPU, {package: version}), "ascend packages")
    assert (one.level is Level.OK, one.stops) == (fits, not fits)
    if not fits:
        assert "pip install vllm==0.23.0 torch-npu==2.10.0.post4" in one.fix


def test_another_vllm_ascend_is_no_reason_to_refuse() -> None:
    one = found(with_packages(NPU, {"vllm-ascend": "0.26.0rc1", "vllm": "0.26.0"}), "ascend packages")
    assert (one.level, one.stops) == (Level.WARNING, False)


def test_a_cann_older_than_vllm_ascend_was_built_for_is_warned_of() -> None:
    assert troubles(with_ascend(cann="9.0.0")) == {"cann and vllm-ascend": "warning"}
