"""Flags of heads and members: what is wrong is said in one line, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.cli import BAD_INPUT, main
from deploy.ports import free_ports, listen


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("proxy", "proxy needs --stages FILE.yaml, or --cluster-key-file FILE"),
        ("proxy --stages x --cluster-key-file KEY", "proxy needs --stages FILE.yaml, or --cluster-key-file FILE"),
        ("proxy --stages x --kv-group-layers 3", "kv_group_layers is for the head"),
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


def test_a_port_that_is_taken_is_named_before_vllm_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1, "127.0.0.3")
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("0123456789abcdef")
    with listen("127.0.0.3", port):
        line = f"stage --join http://127.0.0.1:1 --role EPD --device cpu --host 127.0.0.3 --port {port}"
        assert main([*line.split(), "--cluster-key-file", str(key), "--run-root", str(tmp_path / "run")]) == BAD_INPUT
    assert f"port {port} is in use" in capsys.readouterr().err
