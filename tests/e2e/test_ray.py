"""E and P on one node of a Ray cluster, D on another: real stages answer as a plain monolithic vLLM does.

The nodes share a machine, but nothing is judged by an address: features stay in the arena of the node that parentheses
share, KV crosses from node to node by Mooncake's Transfer Engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bench.change.deployment import Deployment
from bench.served import served
from tests.deploy.ray.nodes import RayNodes, ray_nodes
from tests.deploy.ray.on_ray import RAYLET, commanded_on_ray, victims
from tests.e2e.bodies import SOLO, TWO_CHOICES, Body, about, ask, chat, fresh
from tests.e2e.demo_prompts import PAIRWISE_DIFFERENT, TEXT_ONLY
from tests.e2e.serving import PATIENT, Endpoint
from tests.e2e.test_first_token import CHAT, SEEDED, events, meaning
from tests.waiting import wait_for

Solo = Callable[[Body], list[list[int]]]
pytestmark = [pytest.mark.slow, pytest.mark.mooncake]
NAME = "e2e"
FLAGS = ("--runtime", "ray", "--name", NAME, "--fronts", "here", "--placement", "strict_spread", "--device", "cpu")
START_S = 240.0
TEXT, PICTURE = chat(TEXT_ONLY[0][0]), about(PAIRWISE_DIFFERENT[4])
STREAMS: dict[str, Body] = {
    "text": TEXT,
    "a picture": PICTURE,
    "seeded text": {**TEXT, **SEEDED},
    "a seeded picture": {**PICTURE, **SEEDED},
    "logprobs": {**PICTURE, "logprobs": True, "top_logprobs": 2},
    "usage": {**PICTURE, "stream_options": {"include_usage": True}},
}


@pytest.fixture(scope="module")
def ray() -> Iterator[RayNodes]:
    """A node has one device."""
    with ray_nodes(cpus=1) as made:
        yield made


@pytest.fixture(scope="module")
def launch(ray: RayNodes) -> Iterator[Endpoint]:
    with served("(E-P)-D", [*FLAGS, "--proxy", PATIENT], env=ray.environment, traced=False) as found:
        yield Endpoint(found.url)


@pytest.fixture(scope="module")
def deployment(ray: RayNodes, launch: Endpoint) -> Iterator[Deployment]:
    with commanded_on_ray(ray, NAME) as found:
        yield found


def instances(launch: Endpoint) -> dict[str, dict[str, Any]]:
    return {one["id"]: one for one in launch.get("/instances").json()["instances"]}


def test_parentheses_are_on_one_node_and_kv_crosses_to_another(deployment: Deployment, launch: Endpoint) -> None:
    nodes = {one["id"]: one["node"] for one in deployment.status()["instances"]}
    assert nodes["E0"] == nodes["P0"] != nodes["D0"]
    ask(launch, SOLO["text"])
    (link,) = instances(launch)["P0"]["kv_links"]
    assert (link["state"], link["transport"]) == ("up", "mooncake/tcp")


@pytest.mark.parametrize("name", SOLO)
def test_greedy_tokens_equal_the_monoliths(launch: Endpoint, solo_answer: Solo, name: str) -> None:
    assert ask(launch, SOLO[name]) == solo_answer(SOLO[name])


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_means_what_the_monoliths_does(launch: Endpoint, monolith: Endpoint, name: str) -> None:
    assert meaning(events(launch, CHAT, STREAMS[name])) == meaning(events(monolith, CHAT, STREAMS[name]))


def test_two_choices_equal_the_monoliths(launch: Endpoint, solo_answer: Solo) -> None:
    assert ask(launch, TWO_CHOICES) == solo_answer(TWO_CHOICES)


def test_eight_at_a_time_each_get_the_answer_to_their_own_picture(launch: Endpoint, solo_answer: Solo) -> None:
    bodies = [about(prompt) for prompt in PAIRWISE_DIFFERENT]
    alone = [solo_answer(body) for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda body: ask(launch, body), bodies)) == alone


def test_a_node_dies_and_another_has_its_instances(
    ray: RayNodes, deployment: Deployment, launch: Endpoint, solo_answer: Solo
) -> None:
    """That of E and P, or that of D: whichever is not Ray's head."""
    before = {one["id"]: one for one in deployment.status()["instances"]}
    there = victims(ray, deployment.status())
    node = next(one for one in there if one.kind == RAYLET and one.name in [each["node"] for each in before.values()])
    ray.lose(next(one for one in ray.nodes if one.raylet_pid == node.pid))
    right = solo_answer(fresh(650))
    wait_for(
        lambda: node.name not in [one["node"] for one in deployment.status()["instances"]], "another node", START_S
    )
    deployment.whole(START_S)
    assert ask(launch, fresh(650)) == right
    after = {one["id"]: one for one in deployment.status()["instances"]}
    stayed = [name for name, one in before.items() if one["node"] != node.name]
    assert stayed and all(after[name]["incarnation"] == before[name]["incarnation"] for name in stayed)
