"""Which tiers a launch gets, and what is said where Mooncake is missing."""

from __future__ import annotations

import pytest

from deploy.options import mooncake
from deploy.options.config import DeployConfig
from deploy.options.mooncake import PACKAGES, check_feature_transfer, choose_pool, what_is_missing
from epd_serve.errors import ConfigError
from epd_serve.layout_parser import parse
from epd_serve.placement import InstancePlan, lower

MISSING = "Mooncake is not installed; pip install mooncake-transfer-engine-non-cuda"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "what_is_missing", lambda device, master: "")


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "what_is_missing", lambda device, master: MISSING)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("device", "options", "pooled"),
    [
        ("cpu", {}, False),
        ("cuda", {}, False),
        ("npu", {}, False),
        ("npu", {"mm_store": "arena"}, False),
        ("cpu", {"mm_store": "mooncake"}, True),
        ("cpu", {"mooncake_master": "10.0.0.1:50051"}, True),
    ],
)
def test_auto_is_the_arena_alone_on_one_host_of_every_device_unless_a_master_is_given(
    device: str, options: dict[str, str], pooled: bool
) -> None:
    assert choose_pool(DeployConfig(**options), device, features_travel=True) == (pooled, ())


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_several_nodes_auto_has_the_second_tier(device: str) -> None:
    assert choose_pool(DeployConfig(), device, features_travel=True, several=True) == (True, ())
    alone = DeployConfig(mm_store="arena")
    assert choose_pool(alone, device, features_travel=True, several=True) == (False, ())


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("options", [{"mm_store": "mooncake"}, {"mooncake_master": "10.0.0.1:50051"}])
def test_a_second_tier_that_is_asked_for_beside_npus_comes_with_a_warning(options: dict[str, str]) -> None:
    pooled, (warning,) = choose_pool(DeployConfig(**options), "npu", features_travel=True)
    assert pooled and "has not run on a card" in warning


@pytest.mark.usefixtures("not_installed")
def test_a_second_tier_that_is_asked_for_beside_npus_is_refused_where_there_is_no_mooncake() -> None:
    with pytest.raises(ConfigError, match="--mm-store mooncake: Mooncake is not installed"):
        choose_pool(DeployConfig(mm_store="mooncake"), "npu", features_travel=True)


@pytest.mark.usefixtures("installed")
def test_nodes_with_npus_have_an_arena_each_and_it_is_said_what_that_means() -> None:
    pooled, (warning,) = choose_pool(DeployConfig(), "npu", features_travel=True, several=True)
    assert not pooled
    assert warning.startswith("features go through a node alone, and are computed again on others: Mooncake Store over")
    assert warning.endswith("--mm-store mooncake tries it")


@pytest.mark.usefixtures("not_installed")
def test_auto_without_mooncake_stays_with_the_arenas_and_says_so() -> None:
    pooled, (warning,) = choose_pool(DeployConfig(), "cpu", features_travel=True, several=True)
    assert not pooled
    assert warning == f"features go through a node alone, and are computed again on others: {MISSING}"


@pytest.mark.usefixtures("not_installed")
def test_mooncake_asked_for_and_missing_is_refused_with_the_command() -> None:
    with pytest.raises(ConfigError, match="--mm-store mooncake: Mooncake is not installed; pip install"):
        choose_pool(DeployConfig(mm_store="mooncake"), "cpu", features_travel=True)


def test_a_layout_without_encoders_needs_no_second_tier() -> None:
    assert choose_pool(DeployConfig(), "npu", features_travel=False) == (False, ())
    pooled, (warning,) = choose_pool(DeployConfig(mm_store="mooncake"), "cpu", features_travel=False)
    assert not pooled and "no encode-only instance" in warning


@pytest.mark.parametrize(("device", "package"), list(PACKAGES.items()))
def test_the_package_to_install_depends_on_the_device(
    device: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert what_is_missing(device, master=True) == f"Mooncake is not installed; pip install {package}==0.3.13.post1"


@pytest.mark.mooncake
def test_a_missing_master_program_matters_only_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert what_is_missing("cpu", master=True) == ""
    monkeypatch.setattr(mooncake, "master_program", lambda: None)
    assert "--mooncake-master HOST:PORT" in what_is_missing("cpu", master=True)
    assert what_is_missing("cpu", master=False) == ""


def placed(layout: str) -> tuple[InstancePlan, ...]:
    parsed = parse(layout)
    return lower(parsed, range(parsed.device_count))


@pytest.fixture
def every_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "reads_device_memory", lambda device: "")
    monkeypatch.setattr(mooncake, "what_is_missing", lambda device, master: "")


@pytest.mark.usefixtures("every_build")
@pytest.mark.parametrize(
    ("device", "layout"),
    [("cpu", "E-P-D"), ("cpu", "(E-P)-D"), ("npu", "E-PD"), ("npu", "(E-P)x2-D"), ("cuda", "(E-PD)")],
)
def test_encoders_may_write_to_devices_where_they_can(device: str, layout: str) -> None:
    warnings = check_feature_transfer(DeployConfig(feature_transfer="device"), device, placed(layout))
    assert any("have not run on a card" in line for line in warnings) == (device != "cpu")


@pytest.mark.usefixtures("every_build")
@pytest.mark.parametrize(
    ("device", "layout", "options", "said"),
    [
        ("cpu", "EP-D", {}, "no encode-only instance"),
        ("cpu", "TP1", {}, "no encode-only instance"),
        ("cpu", "E-P-D", {"feature_slab": "off"}, "leave --feature-slab off away"),
        ("cpu", "E-P-D", {"engine": "sim"}, "simulated stages"),
        ("npu", "(E-P)-D", {}, "every encoder shares an NPU"),
    ],
)
def test_where_encoders_cannot_write_to_devices_that_is_refused(
    device: str, layout: str, options: dict[str, str], said: str
) -> None:
    config = DeployConfig(**{"feature_transfer": "device", **options})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"--feature-transfer device: .*{said}") as refused:
        check_feature_transfer(config, device, placed(layout))
    assert refused.value.param == "feature_transfer"
    assert check_feature_transfer(DeployConfig(**options), device, placed(layout)) == ()  # type: ignore[arg-type]


def test_writing_to_devices_without_mooncake_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "installed_builds", dict)
    with pytest.raises(ConfigError, match="--feature-transfer device: Mooncake is not installed: pip install"):
        check_feature_transfer(DeployConfig(feature_transfer="device"), "cpu", placed("E-P-D"))
