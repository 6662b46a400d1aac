"""What a profile says of the machine that it was made on."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.planner.about import driver_versions


def test_the_driver_is_told_where_its_tool_tells_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_versions("cpu") == driver_versions("cuda") == {}
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n[ \"$*\" = '--query-gpu=driver_version --format=csv,noheader' ] && echo 570.86.15\n")
    tool.chmod(0o755)
    assert driver_versions("cuda") == {"driver": "570.86.15"}


def test_cann_is_told_of_an_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version.cfg").write_text("toolkit_running_version=[7.6.0.1.220:8.0.0]\n")
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(tmp_path))
    assert driver_versions("npu")["cann"] == "8.0.0"
