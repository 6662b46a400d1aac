"""What a measurement reads from the launcher."""

from __future__ import annotations

from bench.served import parse_ready
from deploy.blueprint import draw
from deploy.config import DeployConfig
from deploy.ready_message import ready_message
from deploy.rundir import RunDir
from deploy.wiring_plan import SharedMemory, WiringPlan


def test_the_ready_message_names_the_stage_ports(tmp_path):
    blueprint = draw(DeployConfig(layout="(E-P)-D", device="cpu"))
    run = RunDir("launch", tmp_path, tmp_path)
    ports = {"E0": 20001, "P0": 20002, "D0": 20003}

    parsed = parse_ready(ready_message(WiringPlan(blueprint, run, ports, SharedMemory(1, 1)), 12.3))

    assert parsed is not None
    seconds, model, stages = parsed
    assert (seconds, model) == (12.3, "epd-demo")
    assert {stage.instance: (stage.role, stage.port) for stage in stages} == {
        "E0": ("E", 20001),
        "P0": ("P", 20002),
        "D0": ("D", 20003),
    }


def test_half_a_ready_message_is_not_ready():
    assert parse_ready("Ready in 3.0 s: TP1 on cpu serves epd-demo\n") is None
