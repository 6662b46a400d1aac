"""Downloads that are there already, that succeed for another machine only, and that fail."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.contract.wheels import Wheel, download

WHEEL = Wheel("torch-npu", "1.0", "torch_npu", "a test")


class Pip:
    """Stands for pip: has wheels for some machines."""

    def __init__(self, *machines: str) -> None:
        self.machines = machines
        self.asked: list[list[str]] = []

    def __call__(self, command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        self.asked.append(command)
        for machine in self.machines:
            if f"linux_{machine}" in command:
                folder = Path(command[command.index("--dest") + 1])
                (folder / f"torch_npu-1.0-cp311-cp311-manylinux_2_28_{machine}.whl").write_bytes(b"wheel")
                return subprocess.CompletedProcess(command, 0, "", "")
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found\n")


def pip(monkeypatch: pytest.MonkeyPatch, *machines: str) -> Pip:
    made = Pip(*machines)
    monkeypatch.setattr(subprocess, "run", made)
    return made


def test_a_wheel_is_downloaded_without_its_dependencies_and_named_with_its_hash(monkeypatch, tmp_path):
    asked = pip(monkeypatch, "x86_64", "aarch64").asked

    facts = download(WHEEL, tmp_path).facts()

    assert len(asked) == 1
    assert {"download", "--no-deps", "--only-binary=:all:", "torch-npu==1.0"} <= set(asked[0])
    assert facts == {
        "distribution": "torch-npu",
        "version": "1.0",
        "file": "torch_npu-1.0-cp311-cp311-manylinux_2_28_x86_64.whl",
        "sha256": hashlib.sha256(b"wheel").hexdigest(),
    }


def test_a_wheel_that_lies_there_is_not_downloaded_again(monkeypatch, tmp_path):
    asked = pip(monkeypatch, "x86_64").asked
    download(WHEEL, tmp_path)
    download(WHEEL, tmp_path)

    assert len(asked) == 1


def test_where_only_aarch64_was_released_that_is_read(monkeypatch, tmp_path):
    pip(monkeypatch, "aarch64")

    found = download(WHEEL, tmp_path)

    assert found.path is not None
    assert found.path.name.endswith("aarch64.whl")


def test_a_wheel_that_is_nowhere_says_so(monkeypatch, tmp_path):
    pip(monkeypatch)

    assert download(WHEEL, tmp_path).facts()["not_available"] == "the registry has no wheel for Python 3.11 on Linux"


def test_a_download_that_hangs_ends_with_a_reason(monkeypatch, tmp_path):
    def hang(command: list[str], *, timeout: float, **more: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)

    assert "took longer than 900 s" in download(WHEEL, tmp_path).facts()["not_available"]
