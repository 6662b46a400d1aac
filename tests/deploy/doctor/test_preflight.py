"""What a start refuses, and that it asks nobody who could hang."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.doctor import preflight as module
from deploy.doctor.facts import PackageFacts
from deploy.doctor.preflight import preflight
from epd_serve.errors import ConfigError
from tests.deploy.doctor.machines import DRIVER_INFO, NPU

Machine = Callable[..., Path]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with CANN, a driver, and the packages that fit; what is given differs."""

    def make(cann: str = "9.1.0", driver: str = DRIVER_INFO, packages: PackageFacts = NPU.packages) -> Path:
        home = tmp_path / "usr/local/Ascend/cann"
        if cann:
            home.mkdir(parents=True)
            (home / "ascend_toolkit_install.info").write_text(f"version={cann}\n")
        (tmp_path / "usr/local/Ascend/driver").mkdir(parents=True)
        (tmp_path / "usr/local/Ascend/driver/version.info").write_text(driver)
        monkeypatch.setattr(module, "read_packages", lambda: packages)
        return tmp_path

    return make


def look(root: Path, *, refuse: bool = True, **environment: str) -> tuple[str, tuple[str, ...]]:
    named = {"ASCEND_HOME_PATH": str(root / "usr/local/Ascend/cann"), **environment}
    files, warnings = preflight("npu", (), named, refuse=refuse, root=root)
    return files.cann, warnings


def test_a_machine_that_fits_starts_and_its_cann_is_known(machine: Machine) -> None:
    assert look(machine()) == ("9.1.0", ())


def test_on_a_cpu_nothing_is_looked_at(tmp_path: Path) -> None:
    assert preflight("cpu", (), {"VLLM_PLUGINS": "other"}, refuse=True, root=tmp_path)[1] == ()


def test_missing_cann_is_refused_with_the_fix_and_the_way_round(machine: Machine) -> None:
    with pytest.raises(ConfigError, match=r"cann: not found.*Fix: install CANN 9\.1.*--start-checks warn"):
        look(machine(cann=""))


def test_a_driver_that_does_not_fit_cann_is_refused(machine: Machine) -> None:
    with pytest.raises(ConfigError, match=r"CANN 9\.1\.0 on driver 24\.1\.rc3.*install Ascend HDK"):
        look(machine(driver=DRIVER_INFO.replace("25.3.rc1", "24.1.rc3")))


def test_packages_that_do_not_fit_each_other_are_refused(machine: Machine) -> None:
    with pytest.raises(ConfigError, match="not installed: vllm, vllm-ascend, torch-npu"):
        look(machine(packages=PackageFacts(plugin=True)))


def test_what_is_in_the_environment_is_refused_too(machine: Machine) -> None:
    root = machine()
    with pytest.raises(ConfigError, match="balance scheduler"):
        look(root, VLLM_ASCEND_BALANCE_SCHEDULING="1")
    with pytest.raises(ConfigError, match="leaves out epd_serve"):
        look(root, VLLM_PLUGINS="ascend")


def test_who_knows_better_gets_all_of_it_as_warnings(machine: Machine) -> None:
    _, warnings = look(machine(cann="", packages=PackageFacts(plugin=True)), refuse=False)
    assert [line.partition(":")[0] for line in warnings] == ["cann", "ascend packages"]
