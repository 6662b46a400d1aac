"""Which Mooncake is installed, and what follows for the second tier."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError

import pytest

from deploy.options import mooncake, versions
from deploy.options.config import DeployConfig
from deploy.options.mooncake import (
    choose_pool,
    client_warnings,
    installed_builds,
    is_older,
    reads_device_memory,
    what_is_missing,
)
from deploy.options.versions import numbers
from epd_serve.errors import ConfigError

OLD = {"mooncake-transfer-engine-non-cuda": "0.3.11.post1"}
NEW = {"mooncake-transfer-engine-non-cuda": "0.3.13.post1"}
Installs = Callable[[dict[str, str]], None]


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch) -> Installs:
    """Makes these distributions the only ones, with a master and libibverbs beside them."""

    def install(found: dict[str, str]) -> None:
        def version(name: str) -> str:
            if name not in found:
                raise PackageNotFoundError(name)
            return found[name]

        monkeypatch.setattr(versions, "version", version)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if found else None)
        monkeypatch.setattr(mooncake, "master_program", lambda: "mooncake_master")
        monkeypatch.setattr(ctypes, "CDLL", lambda name: None)

    return install


@pytest.mark.parametrize(
    ("text", "older"),
    [("0.3.11.post1", True), ("0.3.13", True), ("0.3.13.post1", False), ("0.3.14", False), ("1.0.0+cann9", False)],
)
def test_versions_are_compared_by_their_numbers(text: str, older: bool) -> None:
    assert is_older(text) is older
    assert numbers("0.3.13.post1+cann9.1") == (0, 3, 13, 1)


def test_a_build_from_source_without_a_version_is_believed(installs: Installs, monkeypatch: pytest.MonkeyPatch) -> None:
    installs({})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert installed_builds() == {"mooncake": ""}
    assert what_is_missing("npu", master=True) == ""


def test_auto_stays_with_the_arena_where_the_master_is_too_old_and_names_the_command(installs: Installs) -> None:
    installs(OLD)
    pooled, (warning,) = choose_pool(DeployConfig(), "cpu", features_travel=True, several=True)
    assert not pooled
    assert "0.3.11.post1 has no mooncake_master whose ports can be bound" in warning
    assert "pip install mooncake-transfer-engine-non-cuda==0.3.13.post1" in warning


def test_a_second_tier_asked_for_is_refused_where_the_master_is_too_old(installs: Installs) -> None:
    installs(OLD)
    with pytest.raises(ConfigError, match=r"pip install mooncake-transfer-engine-non-cuda==0\.3\.13\.post1"):
        choose_pool(DeployConfig(mm_store="mooncake"), "cpu", features_travel=True)


def test_a_master_that_runs_elsewhere_is_the_operators_and_the_clients_limits_are_warned_of(installs: Installs) -> None:
    installs(OLD)
    pooled, (warning,) = choose_pool(DeployConfig(mooncake_master="10.0.0.1:50051"), "cpu", features_travel=True)
    assert pooled
    assert "keeps limits of its own" in warning


def test_the_newer_release_serves_without_a_word(installs: Installs) -> None:
    installs(NEW)
    assert choose_pool(DeployConfig(), "cpu", features_travel=True, several=True) == (True, ())
    assert client_warnings(pooled=True, kv_over_tcp=True) == ()


def test_kv_over_ascend_needs_nothing_new_and_over_tcp_it_is_warned_of(installs: Installs) -> None:
    installs(OLD)
    assert client_warnings(pooled=False, kv_over_tcp=False) == ()
    (warning,) = client_warnings(pooled=False, kv_over_tcp=True)
    assert "200 MB" in warning


@pytest.mark.parametrize(
    ("device", "found", "said"),
    [
        ("cuda", {"mooncake-transfer-engine-non-cuda": "0.3.13.post1"}, "non-cuda reads host memory only"),
        ("cuda", {}, "is not installed: pip install mooncake-transfer-engine-cuda13==0.3.13.post1"),
        ("cuda", {"mooncake-transfer-engine": "0.3.13.post1"}, "is of CUDA 12"),
        ("cuda", {"mooncake-transfer-engine-cuda13": "0.3.13.post1"}, ""),
        ("npu", NEW, ""),
        ("cpu", {"mooncake-transfer-engine-non-cuda": "0.3.13.post1"}, ""),
    ],
)
def test_a_build_without_cuda_is_not_let_near_a_gpus_memory(
    installs: Installs, device: str, found: dict[str, str], said: str
) -> None:
    """It would read the addresses as the host's, which ends the worker at the first transfer."""
    installs(found)
    why = reads_device_memory(device)
    assert (said in why) if said else not why
