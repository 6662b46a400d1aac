"""The file that says who is there: what each kind of reader takes from it, and what it does with a torn one."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd_serve.instances import Instance
from epd_serve.peers import Peer, Peers, peer_of, write_peers
from epd_serve.roles import Role
from epd_serve.wiring import StageWiring

E0 = Peer("E0", Role.E, "h", (0,), events="ipc:///E0.events")
P0 = Peer("P0", Role.P, "h", (0,), events="ipc:///P0.events", kv_endpoint="ipc:///P0.kv")
D0 = Peer("D0", Role.D, "h", (0, 1), events="ipc:///D0.events", kv_workers=("ipc:///D0.kvw0", "ipc:///D0.kvw1"))
D1 = Peer("D1", Role.D, "elsewhere", (0,), kv_workers=("tcp://d1:1",))
BOTH = Peer("P1", Role.P, "h", (2,), kv_endpoint="ipc:///P1.kv", kv_workers=("ipc:///P1.kvw0",))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "peers.json"


def seen_by(file: Path, instance: str, role: Role, key_file: str = "") -> Peers:
    return Peers(StageWiring(instance, role, "life", peers=str(file), node="h", key_file=key_file), every_s=0.0)


def seen(file: Path, instance: str, *peers: Peer) -> Peers:
    write_peers(file, peers)
    made = seen_by(file, instance, Role(instance[0]))
    assert made.changed()
    return made


def test_who_takes_features_is_told_where_encoders_announce(file: Path) -> None:
    assert seen(file, "P0", E0, P0, D0).encoders() == {E0.events}


def test_who_sends_kv_is_told_the_workers_of_all_who_take_it_now(file: Path) -> None:
    assert seen(file, "P0", P0, D0, D1, BOTH).takers_of_kv() == [D0.kv_workers, D1.kv_workers]
    assert seen(file, "D0", P0, D0, D1, BOTH).takers_of_kv() == []


def test_a_flip_changes_who_sends_and_who_takes_but_nobody_has_left(file: Path) -> None:
    p0, p1 = seen(file, "P0", P0, D0, BOTH), seen(file, "P1", P0, D0, BOTH)
    now_decodes = Peer("P1", Role.D, "h", (2,), kv_endpoint=BOTH.kv_endpoint, kv_workers=BOTH.kv_workers)
    write_peers(file, [P0, D0, now_decodes])
    assert p0.changed() and p0.takers_of_kv() == [D0.kv_workers, BOTH.kv_workers]
    assert p1.changed() and p1.role is Role.D and p1.takers_of_kv() == []
    assert p1.may_be_at(D0.kv_workers[0])


def test_whose_line_is_gone_has_left(file: Path) -> None:
    assert not seen(file, "P0", P0, D1).may_be_at(D0.kv_workers[0])


@pytest.mark.parametrize(("address", "beside"), [(D0.kv_workers[1], True), (D1.kv_workers[0], False), ("?", False)])
def test_two_are_beside_each_other_where_node_and_a_device_are_the_same(file: Path, address: str, beside: bool) -> None:
    assert seen(file, "P0", P0, D0, D1).beside(address) is beside


@pytest.mark.parametrize(
    ("address", "together"), [(D0.kv_workers[0], True), (D1.kv_workers[0], False), ("tcp://?:1", None)]
)
def test_who_is_together_is_judged_by_node_and_of_a_stranger_nobody_knows(
    file: Path, address: str, together: bool | None
) -> None:
    write_peers(file, [P0, D0, D1])
    several = seen_by(file, "P0", Role.P, key_file="/run/key")
    assert several.changed() and several.together(address) is together
    assert seen(file, "P0", P0, D0, D1).together(address) is True, "there is one node"


def test_the_other_end_of_a_pair_says_the_same(file: Path) -> None:
    assert seen(file, "D0", P0, D0).beside(P0.kv_endpoint)
    assert not seen(file, "D1", P0, D0, D1).beside(P0.kv_endpoint)


def test_a_change_is_told_once_and_the_same_bytes_are_none(file: Path) -> None:
    peers = seen(file, "P0", P0, E0)
    assert not peers.changed()
    write_peers(file, [P0, E0])
    assert not peers.changed()
    write_peers(file, [P0])
    assert peers.changed() and peers.encoders() == frozenset()
    assert not peers.changed()


def test_the_file_is_read_once_a_second(file: Path) -> None:
    write_peers(file, [P0])
    slow = Peers(StageWiring("P0", Role.P, "life", peers=str(file)), every_s=3600.0)
    assert slow.changed()
    write_peers(file, [P0, E0])
    assert not slow.changed()


@pytest.mark.parametrize(
    "torn", [b"", b'[{"instance": "E0"', b'[{"instance": 3}]', b'[{"instance": "X", "role": "Z"}]']
)
def test_a_torn_file_leaves_the_peers_that_were_there(file: Path, torn: bytes) -> None:
    peers = seen(file, "P0", P0, E0)
    file.write_bytes(torn)
    assert not peers.changed() and peers.encoders() == {E0.events}
    file.unlink()
    assert not peers.changed() and peers.encoders() == {E0.events}
    write_peers(file, [P0])
    assert peers.changed() and peers.encoders() == frozenset()


def test_a_file_that_comes_late_is_found_and_without_one_there_is_nobody(file: Path) -> None:
    late = seen_by(file, "P0", Role.P)
    assert late.changed() and late.encoders() == frozenset()
    write_peers(file, [E0])
    assert late.changed() and late.encoders() == {E0.events}
    alone = Peers(StageWiring("P0", Role.P, "life"))
    assert alone.changed() and not alone.changed() and alone.takers_of_kv() == []


def test_the_line_of_an_instance_is_what_the_proxy_knows_of_it_and_the_part_it_takes(file: Path) -> None:
    instance = Instance(
        id="P1",
        role=Role.P,
        url="http://10.0.0.9:8001",
        incarnation="i",
        kv_endpoint="ipc:///P1.kv",
        events="ipc:///P1.events",
        devices=(2, 3),
        kv_workers=("ipc:///P1.kvw0",),
        node="a",
    )
    line = Peer("P1", Role.P, "a", (2, 3), "ipc:///P1.events", "ipc:///P1.kv", ("ipc:///P1.kvw0",))
    assert peer_of(instance) == line
    assert peer_of(instance, Role.D).role is Role.D
