"""The command line: right answers, and one line with a fix for wrong input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.cli.command import main


def test_layout_prints_canonical_form_and_placement(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "TP1x2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2EPD: 2 instances on 2 devices")
    assert "EPD1      EPD     1" in out


def test_layout_shows_core_shares_and_refuses_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "(E-P)-D", "--core-share", "E=0.25"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [(row[0], row[-1]) for row in rows] == [("instance", "cores"), ("E0", "0.25"), ("P0", "0.75"), ("D0", "all")]
    assert main(["layout", "(E-P)-D", "--core-share", "E=0.5", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["instances"]
    assert [row["core_share"] for row in shown] == [0.5, 0.5, None]
    assert main(["layout", "E-P-D", "--core-share", "E=0.5"]) == 2
    assert "--core-share: E shares its device with nobody" in capsys.readouterr().err


def test_layout_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "(E-P)-D", "--devices", "3", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["layout"], shown["devices"]) == ("(E-P)-D", 2)
    assert [(row["id"], row["devices"]) for row in shown["instances"]] == [("E0", [0]), ("P0", [0]), ("D0", [1])]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["layout", "ED-P"], "(E-D)-P"),
        (["layout", "E-P-D", "--devices", "2"], "layout E-P-D needs 3 devices, found 2: 0, 1"),
        (["layout", "E-P-D", "--devces", "2"], "unknown flag '--devces'; did you mean '--devices'?"),
        (["layuot", "E-P-D"], "unknown COMMAND 'layuot'; did you mean 'layout'?"),
        ([], "COMMAND"),
        (["serve", "--layuot", "E-PD"], "unknown flag '--layuot'; did you mean '--layout'?"),
        (["serve", "--feature-path", "device"], "flag '--feature-path' is no longer there: features pass through host"),
        (["serve", "--feature-path=auto"], "flag '--feature-path' is no longer there: features pass through host"),
        (["serve", "--device", "nup"], "unknown --device 'nup'; did you mean 'npu'?"),
        (["serve", "--port", "x"], "--port is 'x'; expected int"),
        (["serve", "/no/such/model", "--device", "cpu"], "model directory /no/such/model does not exist"),
        (["serve", "a", "b"], "unexpected argument 'b'"),
        (["serve", "--proxy", "media.max_byte=1"], "did you mean 'media.max_bytes'?"),
        (["serve", "--layout", "E-P"], "no D to decode"),
        (["serve", "--device", "cpu", "--stage-args", "Q:--x"], "unknown role or instance 'Q'"),
        (["serve", "--", "--max-num-seqs", "8"], "--stage-args"),
        (["stage"], "give --role"),
        (["stage", "--role", "P"], "--wiring"),
        (["stage", "--wiring", "/no/such"], "cannot be read"),
        (["proxy"], "--stages"),
        (["proxy", "--stages", "/no/such"], "/no/such"),
        (["serve", "--mm-store", "mooncakes"], "unknown --mm-store 'mooncakes'; did you mean 'mooncake'?"),
        (["serve", "--mooncake-master", "nohost"], "mooncake_master 'nohost' is not HOST:PORT"),
        (["serve", "--send-pixels", "sometimes"], "unknown --send-pixels 'sometimes'"),
        (["store", "list"], "unknown action 'list'"),
        (["store"], "action"),
        (["demo-model", "/tmp", "--preset", "tinny"], "did you mean 'tiny'?"),
    ],
)
def test_wrong_input_is_exit_code_2_and_a_line_with_the_fix(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("epd-serve: ")
    assert message in err


def test_too_few_devices_of_a_kind_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-1, NVIDIA A100'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert main(["serve", "--device", "cuda"]) == 2
    assert "layout (E-P)-D needs 2 devices, found 1: 0" in capsys.readouterr().err


def test_a_text_only_model_under_encoders_is_told_the_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    assert main(["serve", str(tmp_path), "--device", "cpu"]) == 2
    assert "use --layout P-D" in capsys.readouterr().err


def test_stage_prints_the_command_it_would_become(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["stage", "--role", "EPD", "--device", "cpu", "--print", "--", "--max-num-seqs", "3"]) == 0
    shown = capfd.readouterr().out
    assert "EPD_SERVE_STAGE=EPD0" in shown
    assert shown.endswith("--max-num-seqs 3\n")


def test_a_stage_takes_its_place_from_a_wiring_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wiring = tmp_path / "P3.json"
    wiring.write_text('{"instance": "P3", "role": "P", "incarnation": "abc", "kv_endpoint": "ipc:///x"}')
    assert main(["stage", "--wiring", str(wiring), "--device", "cpu", "--print"]) == 0
    shown = capfd.readouterr().out
    assert "EPD_SERVE_STAGE=P3" in shown
    assert "GroupedKVConnector" in shown


@pytest.mark.parametrize(("slab", "fits"), [("", True), ("ipc:///y", False)])
def test_a_stage_of_a_wiring_file_has_to_have_room_for_the_slab_that_it_names(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], slab: str, fits: bool
) -> None:
    wiring = tmp_path / "PD0.json"
    named = {"instance": "PD0", "role": "PD", "incarnation": "abc", "slab": slab, "slab_bytes": 1 << 50}
    wiring.write_text(json.dumps(named))
    assert main(["stage", "--wiring", str(wiring), "--device", "cpu", "--print"]) == (0 if fits else 2)
    assert ("of host memory, this machine has" in capfd.readouterr().err) is not fits


def test_demo_model_writes_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo-model", str(tmp_path / "m")]) == 0
    assert (tmp_path / "m" / "config.json").exists()
    assert "epd-serve serve" in capsys.readouterr().out


def test_the_layout_command_loads_no_server_and_no_framework() -> None:
    code = (
        "import sys\nfrom deploy.cli.command import main\nmain(['layout', 'TP1'])\n"
        "bad = {'torch', 'vllm', 'transformers', 'fastapi', 'uvicorn', 'httpx', 'yaml', 'rich', 'numpy', 'pydantic'}\n"
        "bad &= set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, stdout=subprocess.DEVNULL)


def test_planning_a_deployment_loads_no_framework() -> None:
    code = (
        "import os, sys\nfrom deploy.options.config import DeployConfig\nfrom deploy.plan.blueprint import draw\n"
        "import deploy.launch.launcher\ndraw(DeployConfig(device='cpu'))\n"
        "bad = {'torch', 'vllm', 'transformers', 'mooncake', 'numpy'} & set(sys.modules)\n"
        "assert not bad, bad\n"
        "assert len(os.listdir('/proc/self/task')) == 1, 'what is forked has one thread'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
