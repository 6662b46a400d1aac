"""What of a deployment on Ray may be killed, what that excuses, and which figures of the soak test follow from rows."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from bench.change.kills import Kill, Victim, kill
from deploy.host.processes import stat
from tests.deploy.ray import on_ray
from tests.deploy.ray.nodes import RayNode
from tests.deploy.ray.on_ray import NODE, RAYLET, victims
from tests.soak.ray_kills import figures

ME = os.getpid()
PARENT = os.getppid()


class Nodes:
    """A cluster whose second raylet is the parent of this process."""

    nodes = (RayNode("head", 1), RayNode("b", PARENT))


def status(**more: Any) -> dict[str, Any]:
    parts = {"controller": 11, "a/actor": 1, "a/node": 12, "a/control": 13, "a/front.0": 15}
    parts |= {"b/actor": ME, "b/node": 21, "b/control": 22, "mooncake_master": 30}
    instances = [("E0", "E", "a", 41), ("P0", "P", "a", 42), ("D0", "D", "b", 43), ("D1", "D", "b", None)]
    return {
        "parts": {name: {"pid": pid, "restarts": 0} for name, pid in parts.items()},
        "instances": [{"id": id, "role": role, "node": node, "pid": pid} for id, role, node, pid in instances],
        **more,
    }


def test_everything_of_a_deployment_may_be_killed_but_the_head_and_what_does_not_run() -> None:
    assert stat(ME) is not None
    found = {(one.kind, one.name): one for one in victims(Nodes(), status())}
    assert sorted(found) == [
        ("control", "a/control"),
        ("control", "b/control"),
        ("controller", "controller"),
        ("front door", "a/front.0"),
        ("node actor", "a/actor"),
        ("node actor", "b/actor"),
        (NODE, "a/node"),
        (NODE, "b/node"),
        (RAYLET, "b"),
        ("stage", "D0"),
        ("stage", "E0"),
        ("stage", "P0"),
    ]
    assert found[RAYLET, "b"].pid == PARENT
    assert {name for (_, name), one in found.items() if one.front} == {"a/front.0", "a/node"}
    assert {name for (_, name), one in found.items() if one.decodes} == {"b", "b/node", "D0"}


def test_every_kind_has_its_turn_before_one_has_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.change.kills.signal_process", lambda pid, number: None)
    there = [Victim(kind, f"{kind} {one}", 1 << 22) for kind in "abc" for one in range(3)]  # above any pid
    kills: list[Kill] = []
    for _ in range(9):
        kills.append(kill(there, kills, random.Random(len(kills))))
    kinds = [one.victim.kind for one in kills]
    assert [sorted(kinds[at : at + 3]) for at in (0, 3, 6)] == [["a", "b", "c"]] * 3


ROWS: list[dict[str, Any]] = [
    {"part": "kills", "kill": "b", "kind": RAYLET, "at": 3.0},
    {"part": "kills", "kill": "controller", "kind": "controller", "at": 13.0},
    {"part": "kills", "held": 2},
    {"part": "kills", "requests": 50, "errors": 3, "cut": 2, "wrong": 0},
    {"part": "relayout", "from": "E-P-D", "to": "EP-D", "state": "done", "reason": "", "seconds": 3.0, "paused_s": 0.0},
    {
        "part": "relayout",
        "from": "E-P-D",
        "to": "EP-D",
        "state": "failed",
        "reason": "x",
        "seconds": 3.0,
        "paused_s": 0.0,
    },
    {"part": "relayout", "refused": "no room"},
    {"part": "relayout", "requests": 60, "errors": 1, "cut": 1, "wrong": 0},
]


def test_figures_follow_from_rows() -> None:
    named = figures(ROWS)
    assert (named["ray_kills"], named["ray_kill_errors"], named["ray_kill_cut"], named["ray_kill_held"]) == (2, 3, 2, 2)
    assert named["ray_relayouts"] == 3
    assert named["ray_relayout_errors"] == 4, "an error, a cut stream, one that failed and one that was refused"


@pytest.mark.parametrize(
    ("part", "node", "kind"),
    [
        ("controller", "", "controller"),
        ("n/front.1", "n", "front door"),
        ("n/control", "n", "control"),
        ("n/x", "n", ""),
    ],
)
def test_parts_of_a_status_have_a_node_and_a_kind(part: str, node: str, kind: str) -> None:
    assert (on_ray.node_of(part), on_ray.kind_of(part)) == (node, kind)
