"""An agent tells its stages who is there: before they start, when a part changes, when one has left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from deploy.agent.instances import Instances, Kept
from deploy.agent.specs import orders
from deploy.agent.wiring import Site
from deploy.host.rundir import RunDir
from deploy.host.state import SharedState, StateFiles
from epd_serve.peers import Peer, Peers
from epd_serve.roles import Role
from epd_serve.wiring import StageWiring
from tests.deploy.wired import wired


def test_the_file_of_peers_follows_the_instances_that_are_to_run(tmp_path: Path) -> None:
    run = RunDir("abcd", tmp_path, tmp_path)
    instances = Instances(Site(run, staging_bytes=8 << 20), print, SharedState(StateFiles.make()))
    seen_by_p = Peers(StageWiring("P0", Role.P, "life", peers=str(run.peers)), every_s=0.0)
    for number, order in enumerate(orders(wired("E-P-D").blueprint)):
        instances.kept[order.id] = Kept(order, 21000 + number)
    instances.note()
    assert seen_by_p.changed(), "before any of them has begun a life"
    assert seen_by_p.takers_of_kv() == [(run.ipc("D0.kvw0"),)]
    assert seen_by_p.encoders() == {run.ipc("E0.events")}

    instances.before_spawn("D0")
    instances.note()
    instances.down("D0", "ended", 1.0)
    instances.note()
    assert not seen_by_p.changed(), "whoever is between two lives is there"

    d0 = instances.kept["D0"]
    d0.order = replace(d0.order, spec=replace(d0.order.spec, role=Role.P))
    instances.note()
    assert seen_by_p.changed() and seen_by_p.takers_of_kv() == []
    assert seen_by_p.may_be_at(run.ipc("D0.kvw0"))

    del instances.kept["E0"]
    instances.note()
    assert seen_by_p.changed() and seen_by_p.encoders() == frozenset()


def test_those_on_other_nodes_are_told_of_beside_its_own_and_the_next_agent_knows_them(tmp_path: Path) -> None:
    run = RunDir("abcd", tmp_path, tmp_path)
    seen_by_p = Peers(StageWiring("P0", Role.P, "life", peers=str(run.peers)), every_s=0.0)
    files = StateFiles.make()
    first = Instances(Site(run, staging_bytes=8 << 20), print, SharedState(files))
    for number, order in enumerate(orders(wired("E-P-D").blueprint)[:2]):
        first.kept[order.id] = Kept(order, 21000 + number)
    first.know((Peer("D0", Role.D, "b", kv_workers=("tcp://b:21004",)),))
    assert seen_by_p.changed() and seen_by_p.takers_of_kv() == [("tcp://b:21004",)]
    assert seen_by_p.encoders() == {run.ipc("E0.events")}

    run.peers.unlink()
    after = Instances(Site(run, staging_bytes=8 << 20), print, SharedState(files))
    after.note()
    assert seen_by_p.changed() is False, "it is told the same"
    assert run.peers.exists() and seen_by_p.takers_of_kv() == [("tcp://b:21004",)]

    after.know(())
    assert seen_by_p.changed() and seen_by_p.takers_of_kv() == []
