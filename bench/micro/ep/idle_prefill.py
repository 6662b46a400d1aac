"""How long a request waits for its feature at a P with nothing else to do, on stages that run. Part of `transfer ep`.

Real: E-PD as a user starts it, one request at a time, features as large as a 7B model's of images in 1080p and 4K:
[2704 or 16129, 1792] in float32, where EPD-Serve's Table 3 has [2691 or 16206, 3584] in two bytes. Of the model there
is little more than that width. The proxy calls P while E encodes, so the request is in P's scheduler before its feature
is made, and P, which decodes too, waits for no D's blocks: nothing hides the transfer.

    admission     the request's first step at P, minus the later of: in P's scheduler, its image encoded
    exposed       admission minus that of the same request once more, with its feature at P already
    exposed slab  exposed minus a copy of the same bytes: what a request waits beyond the one copy to the memory that
                  is read. A request is let through when its feature lies in P's slab; on a CPU, in the arena.
    copy in step  what P's step copies of the feature, or waits until it has copied
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence

import numpy as np

from bench.clients.sender import ask
from bench.micro.measurement import Goal, Row, in_turns
from bench.micro.rows import grouped, median
from bench.served import Served, scratch, served
from bench.workloads.synthetic import image_body
from epd_serve.demo.presets import RandomPreset, write_preset
from epd_serve.errors import StageError
from epd_serve.phases.stamps import Stamp, Timeline, read_stamps

LAYOUT = "E-PD"
TOKEN_SIDE = 32
HIDDEN_SIZE = 1792  # CPUs without arithmetic for two-byte numbers take long over 3584 of them
FEATURE_BYTES = {"1080p": 52**2 * HIDDEN_SIZE * 4, "4k": 127**2 * HIDDEN_SIZE * 4}
SIDES = {"1080p": 52 * TOKEN_SIDE, "4k": 127 * TOKEN_SIDE}
"""Of square images with about as many tokens as Table 3's."""
WIDE = RandomPreset(
    text={
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32_768,
    },
    vision={
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "depth": 0,  # attention over 64,000 patches would take CPUs 20 s
        "deepstack_visual_indexes": [],
        "out_hidden_size": HIDDEN_SIZE,
    },
    max_pixels=SIDES["4k"] ** 2,
)
ROOM = SIDES["4k"] ** 2 // TOKEN_SIDE**2 + 256
# Without a prefix cache the second of two equal requests is admitted as the first was.
STAGE_ARGS = (
    f"all:--dtype float32 --max-model-len {ROOM} --max-num-batched-tokens {ROOM} --max-num-seqs 4"
    " --no-enable-prefix-caching"
)
ANSWER_TOKENS = 2
STAMPS_S = 0.5
_BEFORE = "what it was before features were rows of one table"
_SLAB = "one copy to the device is what there has to be"
GOALS = (
    Goal("exposed_ms_1080p", "<=", 11.5, _BEFORE),
    Goal("exposed_ms_4k", "<=", 49.9, _BEFORE),
    Goal("exposed_ms_slab_1080p", "<=", 2.0, _SLAB),
    Goal("exposed_ms_slab_4k", "<=", 4.0, _SLAB),
    Goal("copy_in_step_ms_4k", "<=", 0.5, "the step gets a view; a copy takes tens of milliseconds"),
)
_COPIES = 3


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """A row of each pair of requests: a new image, and the same again. The first pair of each size is not counted."""
    with scratch() as folder:
        write_preset(folder / "model", WIDE)
        with served(LAYOUT, [str(folder / "model"), "--stage-args", STAGE_ARGS]) as launch:
            for image in SIDES:
                pair_ms(launch, image, 0)
            for turn, image in in_turns([*SIDES], arguments.rounds, arguments.budget_s):
                copied = {"memcpy_ms": memcpy_ms(FEATURE_BYTES[image])}
                yield {"picture": image, "round": turn, **pair_ms(launch, image, turn + 1), **copied}


def memcpy_ms(nbytes: int) -> float:
    """Of so many bytes from memory to memory, both touched before. The best of a few."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    took: list[float] = []
    for _ in range(_COPIES):
        begun = time.perf_counter()
        target[:] = source
        took.append(1e3 * (time.perf_counter() - begun))
    return round(min(took), 4)


def pair_ms(launch: Served, image: str, seed: int) -> dict[str, float]:
    """Two equal requests for an image of this size that no other seed gives."""
    body = image_body(launch.model, side=SIDES[image], answer=ANSWER_TOKENS, stream=True, seed=seed)
    records = [ask(launch.url, body) for _ in range(2)]
    time.sleep(STAMPS_S)  # the last ones are written after the answer
    timeline = Timeline(read_stamps(launch.traces))
    new, again = (timeline.named(record.id) for record in records)
    found = {"admission_ms": admission_s(new), "local_ms": admission_s(again), "copy_ms": copy_in_step_s(new)}
    return {name: round(1e3 * seconds, 4) for name, seconds in found.items()}


def copy_in_step_s(stamps: Sequence[Stamp]) -> float:
    """How long the feature's way into vLLM's encoder cache took of the step at P. Raises StageError: no stamp tells."""
    for stamp in stamps:
        if stamp.event == "feature_loaded" and stamp.instance.startswith("PD"):
            return stamp.t - float(stamp.more["t0"])
    raise StageError("no step has loaded the feature", stage=LAYOUT)


def admission_s(stamps: Sequence[Stamp]) -> float:
    """How long the request waited in P's scheduler after its image was encoded, if it was.

    Raises:
        StageError: no stamp tells.
    """
    at = {(stamp.instance.rstrip("0123456789"), stamp.event): stamp.t for stamp in reversed(stamps)}
    try:
        return at["PD", "scheduled"] - max(at["PD", "queued"], at.get(("E", "encoded"), 0.0))
    except KeyError as lacking:
        raise StageError(f"a request left no stamp {lacking}", stage=LAYOUT) from None


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """`exposed_ms_1080p`, and the two times of which it is the difference, and so on. Medians."""
    named: dict[str, float] = {}
    for (image,), own in grouped(rows, "picture").items():
        pairs = [{**row, "exposed_ms": row["admission_ms"] - row["local_ms"]} for row in own]
        named |= {f"{name}_{image}": median(pairs, name) for name in ("exposed_ms", "admission_ms", "local_ms")}
        if all("copy_ms" in row for row in own):
            slab = [{"ms": row["exposed_ms"] - row["memcpy_ms"]} for row in pairs]
            named[f"exposed_ms_slab_{image}"] = median(slab, "ms")
            named[f"memcpy_ms_{image}"] = median(own, "memcpy_ms")
            named[f"copy_in_step_ms_{image}"] = median(own, "copy_ms")
    return named
