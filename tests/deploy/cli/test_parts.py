"""Flags of `epd-serve stage` and `proxy`, and bounds of `serve`: what is wrong is said in one line, at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.cli.command import BAD_INPUT, main
from deploy.host.ports import free_ports, listen
from deploy.options.config import LEAST_SEGMENT_MIB
from store.mooncake.client import LEAST_SEGMENT_BYTES


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("proxy", "proxy needs --stages FILE.yaml, or --stage [ROLE=]URL"),
        ("proxy --stages x --stage http://h:1", "proxy needs --stages FILE.yaml, or --stage [ROLE=]URL"),
        ("proxy --stage http://h:1", "--stage needs --served-model-name"),
        ("proxy --stage P=http://h:1 --served-model-name m", "P works with other stages"),
        ("proxy --stage http://h:1 --served-model-name m --stage-key-file none", "openssl rand"),
        ("proxy --stage http://h:1 --served-model-name m --proxy retires=1", "retries"),
        ("proxy --stage http://h:1 --served-model-name m --workers 0", "--workers is '0'; expected int >= 1"),
        ("proxy --stage http://h:1 --served-model-name m --drain-s nan", "--drain-s is 'nan'; expected float >= 0"),
        ("proxy --stage http://h:1 --served-model-name m --port 9 --admin-port 9", "the clients' port"),
        ("proxy --stage http://h:1 --served-model-name m --port 65536", "expected int <= 65535"),
        ("proxy --stage http://h:1 --served-model-name m -- --port 1", "nothing is passed on after --"),
        ("stage --role EPD --stage-key-file none", "openssl rand"),
        ("stage --role EPD --port 65536", "not between 1 and 65535"),
        ("stage --role EPD --device cpu --device-ids 0,0", "not a list such as 0,1"),
        ("stage --role E --device cpu", "give their addresses by --wiring"),
        ("serve --mooncake-segment-mib 1", "--mooncake-segment-mib is '1'; expected int >= 16"),
        ("serve --kv-grouping layers:4", "kv_grouping 'layers:4' is none of adaptive, fixed:N, layerwise, bulk"),
        ("serve --kv-packet-floor-kib 0", "--kv-packet-floor-kib is '0'; expected int >= 1"),
        ("serve --kv-packet-floor-kib 1M", "--kv-packet-floor-kib is '1M'; expected int"),
        ("serve --kv-faults drop", "'drop' is no fault"),
        ("serve --mooncake-master a..b:1", "not HOST:PORT"),
        ("serve --mooncake-master ::1:80", "not HOST:PORT"),
        ("serve --host a..b", "it is no host name"),
        ("serve --startup-timeout-s nan", "--startup-timeout-s is 'nan'; expected float > 0"),
    ],
)
def test_what_is_wrong_is_named(capsys: pytest.CaptureFixture[str], line: str, said: str) -> None:
    assert main(line.split()) == BAD_INPUT
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_key_that_everybody_may_read_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "key"
    key.write_text("0123456789abcdef")
    key.chmod(0o644)
    assert main(["stage", "--role", "EPD", "--stage-key-file", str(key)]) == BAD_INPUT
    assert "chmod 600" in capsys.readouterr().err


def test_a_guarded_stage_has_its_guard_and_no_command_line_has_its_key(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("0123456789abcdef")
    line = f"stage --role EPD --device cpu --print --stage-key-file {key}"
    assert main(line.split()) == 0
    shown = capfd.readouterr().out
    assert "epd_serve.engine.stage_guard.StageGuard" in shown and "0123456789abcdef" not in shown


@pytest.mark.parametrize(
    ("wiring", "said"),
    [
        ('{"instance": "E0", "role": "Z", "incarnation": "1"}', "'Z' is no role"),
        ('{"instance": "E0", "role": ["E"], "incarnation": "1"}', "is no role"),
        ('{"instance": "E0", "role": "E", "incarnation": "1", "kv_peers": 3}', "kv_peers"),
        ('{"instance": "E0", "role": "E"}', "incarnation"),
        ('{"instance": "E0", "incarnation": "1"}', "role"),
        ("[]", "needs instance, role and incarnation"),
    ],
)
def test_a_wiring_file_that_is_wrong_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wiring: str, said: str
) -> None:
    (tmp_path / "w.json").write_text(wiring)
    assert main(["stage", "--wiring", str(tmp_path / "w.json"), "--print"]) == BAD_INPUT
    assert said in capsys.readouterr().err


def test_the_least_segment_is_the_stores() -> None:
    assert LEAST_SEGMENT_MIB << 20 == LEAST_SEGMENT_BYTES


def test_a_clients_port_that_is_taken_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    with listen("127.0.0.1", port):
        line = f"proxy --stage http://h:1 --served-model-name m --port {port} --run-root {tmp_path}"
        assert main(line.split()) == BAD_INPUT
    error = capsys.readouterr().err
    assert f"port {port} is in use" in error and "--port" in error
