"""Wiring survives its trip through vLLM's JSON; roles say what a stage takes and gives."""

from __future__ import annotations

import json

import pytest

from epd_serve.errors import ConfigError
from epd_serve.roles import Role
from epd_serve.wiring import StageWiring, worker_endpoint, worker_endpoints


@pytest.mark.parametrize("role", Role)
def test_wiring_survives_json(role: Role) -> None:
    wiring = StageWiring(
        "X0",
        role,
        "abc",
        arena="/dev/shm/a",
        peers="/run/peers.json",
        kv_grouping="fixed:2",
    )
    assert StageWiring.from_json(json.loads(json.dumps(wiring.to_json()))) == wiring


def test_unknown_keys_are_refused_by_name() -> None:
    raw = {**StageWiring("P0", Role.P, "i").to_json(), "kv_colour": "red"}
    with pytest.raises(ConfigError, match="kv_colour"):
        StageWiring.from_json(raw)


@pytest.mark.parametrize(
    ("role", "gives_features", "takes_features", "gives_kv", "takes_kv"),
    [
        (Role.E, True, False, False, False),
        (Role.P, False, True, True, False),
        (Role.D, False, True, False, True),
        (Role.EP, False, False, True, False),
        (Role.PD, False, True, False, False),
        (Role.EPD, False, False, False, False),
    ],
)
def test_what_a_role_gives_and_takes(
    role: Role, gives_features: bool, takes_features: bool, gives_kv: bool, takes_kv: bool
) -> None:
    assert (role.sends_features, role.takes_features) == (gives_features, takes_features)
    assert (role.sends_kv, role.takes_kv) == (gives_kv, takes_kv)


@pytest.mark.parametrize(
    ("template", "rank", "address"),
    [
        ("ipc:///run/D0.kvw{rank}", 3, "ipc:///run/D0.kvw3"),
        ("ipc:///run+1/D0.kvw{rank}", 0, "ipc:///run+1/D0.kvw0"),
        ("tcp://10.0.0.4:8002+{rank}", 0, "tcp://10.0.0.4:8002"),
        ("tcp://10.0.0.4:8002+{rank}", 7, "tcp://10.0.0.4:8009"),
    ],
)
def test_a_workers_address_follows_from_the_template_and_its_rank(template: str, rank: int, address: str) -> None:
    assert worker_endpoint(template, rank) == address


def test_the_addresses_of_all_workers_are_in_the_order_of_their_ranks() -> None:
    assert worker_endpoints("tcp://h:8002+{rank}", 2) == ("tcp://h:8002", "tcp://h:8003")
    assert worker_endpoints("", 2) == ()
