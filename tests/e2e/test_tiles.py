"""Two real encoders share a request: by item, and one image by its tiles. Token for token against a plain vLLM.

Which encoders get what follows from their measured speeds, and one that a busy machine made look slow shares nothing: a
plugin of the tests has both report the same (`tests/e2e/same_speed.py`), and each test begins with all stages idle.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from epd_serve.demo.pictures import draw, scene
from epd_serve.demo.presets import write_preset
from store.arena import Arena
from tests.e2e.bodies import Body, ask, image_part, png, tokens
from tests.e2e.same_speed import TOKENS_PER_S
from tests.e2e.serving import MODEL, Serving, plain_vllm, serving
from tests.e2e.vllm_plugin import plugin
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

LAYOUT, BOTH = "2E-P-D", ("E0", "E1")
LIMITS = ("--limit-mm-per-prompt", '{"image": 4, "video": 0}')
# Nearer ties of random weights would be decided by rounding, which differs with the number of tiles in a batch.
EXACT = ("--dtype", "float32")
IMAGES = 8
PARTS = "epd_proxy_image_parts_total"


def picture(seed: int) -> Body:
    """Of 2:1, which is two tiles and a thumbnail. Asked for again it has the same key."""
    return image_part(png(draw(scene(seed), (448, 224))))


def body(*seeds: int) -> Body:
    content = [*map(picture, seeds), {"type": "text", "text": "What is in the picture?"}]
    asked = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0}
    return {**asked, "return_token_ids": True}


@dataclass
class Held:
    """A launch, what a plain vLLM answers, and images that were not asked about yet."""

    launch: Serving
    plain: dict[tuple[int, ...], list[list[int]]]
    unused: Iterator[int] = field(default_factory=lambda: iter(range(IMAGES)))

    def answered(self, *seeds: int) -> tuple[str, ...]:
        """Who encoded, for an answer that has to be the plain vLLM's."""
        response = self.launch.post("/v1/chat/completions", body(*seeds), headers={"x-epd-explain": "1"})
        assert tokens(response) == self.plain[seeds]
        words = dict(pair.split("=") for pair in response.headers["x-epd-instances"].split(", "))
        return tuple(sorted(words["encode"].split("+"))) if "encode" in words else ()

    def encoded(self) -> tuple[int, ...]:
        """Items, or parts, by encoder."""
        return tuple(self.launch.settled_counters(name).get("encoded", 0) for name in BOTH)

    def new_image(self) -> int:
        """One that nobody has encoded; nor has anybody anything else to do."""
        wait_for(lambda: all(one["pending_s"] == 0 for one in self.launch.instances().values()), "all to be idle", 30)
        return next(self.unused)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    model = tmp_path_factory.mktemp("tiles") / "model"
    write_preset(model, "internvl-tiny")
    asked = [(seed,) for seed in range(IMAGES)] + [(seed, seed + 1) for seed in range(IMAGES - 1)]
    with plain_vllm(model, *LIMITS, *EXACT) as monolith:
        plain = {seeds: ask(monolith, body(*seeds)) for seeds in asked}
    flags = ["--served-model-name", MODEL, "--stage-args", f"all:{EXACT[0]} {EXACT[1]} {LIMITS[0]} '{LIMITS[1]}'"]
    with plugin(tmp_path_factory.mktemp("plugin"), "tests.e2e.same_speed"):
        with serving(LAYOUT, str(model), *flags) as launch:
            speeds = {launch.instances()[name]["stage"]["item_tokens_per_s"] for name in BOTH}
            assert speeds == {TOKENS_PER_S}
            yield Held(launch, plain)


def test_one_image_is_encoded_by_both_encoders_each_its_tiles(held: Held) -> None:
    before, parts, seed = held.encoded(), held.launch.metric(PARTS), held.new_image()
    assert held.answered(seed) == BOTH
    assert held.launch.metric(PARTS) == parts + 2
    after = held.encoded()
    assert [later - earlier for earlier, later in zip(before, after, strict=True)] == [1, 1]
    assert held.launch.recomputed("P0") == 0, "P had to encode it"
    assert held.answered(seed) == (), "what is there in parts is used again"
    assert held.encoded() == after


def test_two_images_of_a_request_go_to_two_encoders_whole(held: Held) -> None:
    parts, seed = held.launch.metric(PARTS), held.new_image()
    assert next(held.unused) == seed + 1
    assert held.answered(seed, seed + 1) == BOTH
    assert held.launch.metric(PARTS) == parts, "whoever has an image of its own shares none"
    encoded = held.encoded()
    assert held.answered(seed) == held.answered(seed + 1) == (), "a feature that is there whole is used whole"
    assert (held.encoded(), held.launch.metric(PARTS)) == (encoded, parts)


def test_requests_for_one_image_at_once_have_it_encoded_once(held: Held) -> None:
    seed, before = held.new_image(), held.encoded()
    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(lambda _: ask(held.launch, body(seed)), range(4)))
    assert answers == [held.plain[seed,]] * 4
    assert sum(held.encoded()) - sum(before) in (1, 2), "whole, or each half once"


def test_an_image_of_which_the_store_has_lost_a_part_is_encoded_once_more(held: Held) -> None:
    path = next(path for path in held.launch.shared_memory() if path.name.endswith("-arena"))
    seed, arena = held.new_image(), Arena.attach(path)
    assert held.answered(seed) == BOTH
    parts = [entry.meta.key for entry in arena.entries() if entry.meta.key.endswith("/1-2")]
    for part in parts:
        arena.remove(part)
    arena.close()
    assert parts
    wait_for(lambda: held.answered(seed) != (), "encoders to be asked again, once the proxy looks at the store", 10)


def test_an_encoder_that_is_killed_with_half_of_an_image_costs_no_answer(held: Held) -> None:
    launch, parts, seed = held.launch, held.launch.metric(PARTS), held.new_image()
    with ThreadPoolExecutor(1) as client:
        launch.signal_stage("E1", signal.SIGSTOP)
        asked = client.submit(launch.post, "/v1/chat/completions", body(seed))
        try:
            wait_for(lambda: asked.done() or launch.metric(PARTS) > parts, "the image to be placed", 30)
        finally:
            launch.signal_stage("E1", signal.SIGKILL)
        assert launch.metric(PARTS) == parts + 2
        assert tokens(asked.result(timeout=120)) == held.plain[seed,]
    assert launch.recomputed("P0") == 0, "the other encoder had time for its half"
    wait_for(launch.healthy, "E1 to be back", 240)
    assert held.answered(held.new_image()) == BOTH
