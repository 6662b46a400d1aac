"""What is read of an Ascend installation, in the places where its versions lie."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from deploy.doctor.ascend_files import AscendFiles, cann_version, read_ascend
from tests.deploy.doctor.machines import DRIVER_INFO, INSTALL_INFO, OPP_INFO, VERSION_CFG


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_machine_without_ascend_has_nothing(tmp_path: Path) -> None:
    assert read_ascend({}, tmp_path) == AscendFiles()


@pytest.mark.parametrize(
    ("place", "text", "version"),
    [
        (f"{platform.machine()}-linux/ascend_toolkit_install.info", INSTALL_INFO, "8.3.RC2"),
        ("ascend_toolkit_install.info", INSTALL_INFO, "8.3.RC2"),
        ("version.cfg", VERSION_CFG, "8.0.0"),
        ("opp/version.info", OPP_INFO, "8.5.0"),
        ("opp/version.info", "no version in it", ""),
    ],
)
def test_cann_tells_its_version_in_several_files(tmp_path: Path, place: str, text: str, version: str) -> None:
    write(tmp_path / place, text)
    assert cann_version(tmp_path) == version


def test_the_environments_cann_comes_before_the_default_places(tmp_path: Path) -> None:
    write(tmp_path / "usr/local/Ascend/ascend-toolkit/latest/version.cfg", VERSION_CFG)
    mine = write(tmp_path / "mine/ascend_toolkit_install.info", INSTALL_INFO).parent
    named = read_ascend({"ASCEND_HOME_PATH": str(mine)}, tmp_path)
    assert (named.cann, named.sourced) == ("8.3.RC2", True)
    unnamed = read_ascend({}, tmp_path)
    assert (unnamed.cann, unnamed.sourced, unnamed.home[-6:]) == ("8.0.0", False, "latest")


def test_libraries_on_the_path_are_as_good_as_a_name(tmp_path: Path) -> None:
    write(tmp_path / "usr/local/Ascend/cann/version.cfg", VERSION_CFG)
    library = write(tmp_path / "lib64/libascendcl.so").parent
    assert read_ascend({"LD_LIBRARY_PATH": f":/nowhere:{library}"}, tmp_path).sourced


def test_hixl_is_seen_by_its_library(tmp_path: Path) -> None:
    write(tmp_path / "usr/local/Ascend/cann/lib64/libcann_hixl.so")
    assert read_ascend({}, tmp_path).hixl


def test_the_driver_is_found_where_its_installer_says(tmp_path: Path) -> None:
    write(tmp_path / "opt/Ascend/driver/version.info", DRIVER_INFO)
    assert read_ascend({}, tmp_path).driver == ""
    write(tmp_path / "etc/ascend_install.info", "UserName=x\nDriver_Install_Path_Param=/opt/Ascend\n")
    assert read_ascend({}, tmp_path).driver == "25.3.rc1"


def test_the_network_of_the_cards_is_configured_where_the_file_says_something(tmp_path: Path) -> None:
    write(tmp_path / "etc/hccn.conf", "\n")
    assert not read_ascend({}, tmp_path).hccn_conf
    write(tmp_path / "etc/hccn.conf", "address_0=192.168.1.2\n")
    assert read_ascend({}, tmp_path).hccn_conf
