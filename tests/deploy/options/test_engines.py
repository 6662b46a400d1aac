"""The command of a simulated stage, read back by its own parser."""

from __future__ import annotations

from deploy.options.engines import sim_command
from epd_serve.roles import Role
from epd_serve.sim.main import parsed
from tests.epd_serve.sim.plans import plan_of


def test_a_plan_arrives_whole() -> None:
    command = sim_command(plan_of("sim", sim_profile="p.json", extra_args=("--max-num-seqs", "7")))
    assert command.argv[1:3] == ("-m", "epd_serve.sim")
    read = parsed(command.argv[3:])
    assert (read.host, read.port, read.served_model_name, read.model) == ("127.0.0.1", 8101, "a-name", "a-model")
    assert (read.profile, read.guarded, read.max_running, read.tensor_parallel_size) == ("p.json", True, 7, 2)
    assert read.scheduling_policy == "priority" and '"instance": "P0"' in read.wiring


def test_a_socket_takes_the_place_of_the_port() -> None:
    command = sim_command(plan_of("sim", uds="/run/P0.http"))
    assert parsed(command.argv[3:]).uds == "/run/P0.http" and not {"--host", "--port", "--guarded"} & set(command.argv)


def test_an_encoder_has_no_priorities() -> None:
    assert parsed(sim_command(plan_of("sim", Role.E)).argv[3:]).scheduling_policy == "fcfs"
