"""Flags of heads and members: what is wrong is said in one line, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.cli.command import BAD_INPUT, main
from deploy.host.ports import free_ports, listen
from deploy.options.config import LEAST_SEGMENT_MIB
from store.mooncake.client import LEAST_SEGMENT_BYTES
from tests.deploy.launched import neighbours


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("proxy", "proxy needs --stages FILE.yaml or --stage URL, or --cluster-key-file"),
        (
            "proxy --stages x --cluster-key-file KEY",
            "proxy needs --stages FILE.yaml or --stage URL, or --cluster-key-file",
        ),
        ("proxy --stages x --kv-grouping bulk", "kv_grouping is for the head"),
        ("proxy --cluster-key-file none", "openssl rand"),
        ("proxy --cluster-key-file KEY --host 0.0.0.0", "give the address by which the other machines reach this one"),
        ("proxy --cluster-key-file KEY --mooncake-master somewhere", "not HOST:PORT"),
        ("proxy --cluster-key-file KEY --mooncake-master none --proxy retires=1", "retries"),
        ("proxy --cluster-key-file KEY --mooncake-master none -- --port 1", "--port is set by the launcher"),
        ("stage --join http://127.0.0.1:1 --cluster-key-file KEY", "--join needs --role"),
        ("stage --join http://127.0.0.1:1 --role E --print", "--print is not for --join"),
        ("stage --join http://127.0.0.1:1 --role E --served-model-name x", "the head decides it"),
        ("stage --join 127.0.0.1:1 --role EPD --device cpu --cluster-key-file KEY", "not http://HOST:PORT"),
        ("stage --join http://h:1 --role EPD --cluster-key-file KEY -- --api-key x", "decided by the cluster"),
        ("stage --role EPD --cluster-key-file KEY", "needs --join"),
        ("stage --join http://h:1 --role E --cluster-key-file KEY --port 65536", "not between 1 and 65535"),
        ("stage --join http://h:1 --role D --cluster-key-file KEY --port 65535", "port 65536 is not between 1 and"),
        ("stage --join http://h:1 --role E --cluster-key-file KEY --host a..b", "it is no host name"),
        (
            "stage --join http://h:1 --role E --cluster-key-file KEY --mooncake-segment-mib -1",
            "takes no segment below 16",
        ),
        ("serve --mooncake-segment-mib 1", "takes no segment below 16"),
        ("serve --kv-grouping layers:4", "kv_grouping 'layers:4' is none of adaptive, fixed:N, layerwise, bulk"),
        ("serve --kv-packet-floor-kib 0", "kv_packet_floor_kib is 0; it has to be positive"),
        ("serve --kv-packet-floor-kib 1M", "argument --kv-packet-floor-kib: invalid int value: '1M'"),
        ("proxy --cluster-key-file KEY --kv-grouping fixed:x", "kv_grouping 'fixed:x' is none of"),
        ("stage --join http://h:1 --role P --cluster-key-file KEY --kv-faults drop", "'drop' is no fault"),
        ("stage --join http://h:1 --role E --cluster-key-file KEY --drain-s nan", "not between 0 and 120"),
        ("stage --join http://h:1 --role E --cluster-key-file KEY --drain-s 121", "not between 0 and 120"),
        ("stage --join http://h:1 --role E --cluster-key-file KEY --startup-timeout-s nan", "has to be positive"),
        ("stage --join http://h:1 --role E --cluster-key-file KEY --instance ../x", "letters, digits"),
        ("stage --join http://h:1 --role E --cluster-key-file KEY --device-ids 0,0", "not a list such as 0,1"),
        ("stage --join http://h:1 --role ED --cluster-key-file KEY", "run E and D apart"),
        ("stage --join http://h:1 --role E", "give the file with the cluster's key"),
        ("stage --join http://[::1 --role E --cluster-key-file KEY", "not http://HOST:PORT"),
        ("stage --join http://h:x --role E --cluster-key-file KEY", "not http://HOST:PORT"),
        ("stage --join http://h:99999 --role E --cluster-key-file KEY", "not http://HOST:PORT"),
        ("stage --join http://user:word@h:1 --role E --cluster-key-file KEY", "not http://HOST:PORT"),
        ("stage --join http://h:1/?x --role E --cluster-key-file KEY", "not http://HOST:PORT"),
        ("proxy --cluster-key-file KEY --mooncake-master none --cluster-port 65533", "have to be below 65536"),
        ("proxy --cluster-key-file KEY --mooncake-master none --cluster-port 7998", "one of the cluster's five"),
        ("proxy --cluster-key-file KEY --cluster-port 0", "not between 1 and 65535"),
        ("proxy --cluster-key-file KEY --cluster-host a..b", "it is no host name"),
        ("proxy --cluster-key-file KEY --mooncake-master http://h:1", "not HOST:PORT"),
        ("proxy --stages x --cluster-port 5", "cluster_port is for the head"),
        ("proxy --stages x --mooncake-master none", "mooncake_master is for the head"),
        ("serve --mooncake-master a..b:1", "not HOST:PORT"),
        ("serve --mooncake-master ::1:80", "not HOST:PORT"),
        ("serve --host a..b", "it is no host name"),
        ("serve --startup-timeout-s nan", "has to be positive"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, said: str) -> None:
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("0123456789abcdef")
    words = [str(key) if word == "KEY" else word for word in line.split()]
    if words[0] == "stage" and "--cluster-key-file" in words:
        words[1:1] = ["--run-root", str(tmp_path / "run")]
    assert main(words) == BAD_INPUT
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.mooncake
def test_a_stranger_on_the_masters_port_is_named_and_never_taken_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its /health might answer before our master has found out that it cannot listen."""
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("0123456789abcdef")
    port = neighbours(14)
    flags = f"--port {port} --cluster-key-file {key} --run-root {tmp_path / 'run'}"
    with listen("127.0.0.1", port + 10 + 3):
        assert main(["proxy", *flags.split()]) == BAD_INPUT
    error = capsys.readouterr().err
    assert f"mooncake_master cannot listen on 127.0.0.1:{port + 13}" in error
    assert "--cluster-port" in error


@pytest.mark.parametrize(
    ("wiring", "said"),
    [
        ('{"instance": "E0", "role": "Z", "incarnation": "1"}', "'Z' is no role"),
        ('{"instance": "E0", "role": ["E"], "incarnation": "1"}', "is no role"),
        ('{"instance": "E0", "role": "E", "incarnation": "1", "kv_peers": 3}', "kv_peers"),
    ],
)
def test_a_wiring_file_that_is_wrong_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wiring: str, said: str
) -> None:
    (tmp_path / "w.json").write_text(wiring)
    assert main(["stage", "--wiring", str(tmp_path / "w.json"), "--print"]) == BAD_INPUT
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "stage", ['url: "http://[::1"', 'url: "http://h:99999"', 'url: "http://h:1", devices: 3', 'url: "http://h:1/v1"']
)
def test_a_stages_file_that_is_wrong_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], stage: str) -> None:
    (tmp_path / "s.yaml").write_text(f"model: m\nstages: [{{id: a, role: PD, {stage}}}]\n")
    assert main(["proxy", "--stages", str(tmp_path / "s.yaml")]) == BAD_INPUT
    assert "stages file" in capsys.readouterr().err


def test_the_least_segment_is_the_stores() -> None:
    assert LEAST_SEGMENT_MIB << 20 == LEAST_SEGMENT_BYTES


def test_a_port_that_is_taken_is_named_before_vllm_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1, "127.0.0.3")
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("0123456789abcdef")
    with listen("127.0.0.3", port):
        line = f"stage --join http://127.0.0.1:1 --role EPD --device cpu --host 127.0.0.3 --port {port}"
        assert main([*line.split(), "--cluster-key-file", str(key), "--run-root", str(tmp_path / "run")]) == BAD_INPUT
    assert f"port {port} is in use" in capsys.readouterr().err
