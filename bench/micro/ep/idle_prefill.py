"""How long a request waits for its feature at a P with nothing else to do, on stages that run. Part of `transfer ep`.

Real: E-PD as a user starts it, one request at a time, features as large as a 7B model's of images in 1080p and 4K:
[2704 or 16129, 1792] in float32, where EPD-Serve's Table 3 has [2691 or 16206, 3584] in two bytes. Of the model there
is little more than that width. The proxy calls P while E encodes, so the request is in P's scheduler before its feature
is made, and P, which decodes too, waits for no D's blocks: nothing hides the transfer.

    admission   the request's first step at P, minus the later of: in P's scheduler, its image encoded
    exposed     admission minus that of the same request once more, with its feature in P's arena already
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence

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
GOALS = (Goal("exposed_ms_1080p", "<=", 11.5, _BEFORE), Goal("exposed_ms_4k", "<=", 49.9, _BEFORE))


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """A row of each pair of requests: a new image, and the same again. The first pair of each size is not counted."""
    with scratch() as folder:
        write_preset(folder / "model", WIDE)
        with served(LAYOUT, [str(folder / "model"), "--stage-args", STAGE_ARGS]) as launch:
            for image in SIDES:
                _pair_ms(launch, image, 0)
            for turn, image in in_turns([*SIDES], arguments.rounds, arguments.budget_s):
                admission_ms, local_ms = _pair_ms(launch, image, turn + 1)
                yield {"picture": image, "round": turn, "admission_ms": admission_ms, "local_ms": local_ms}


def _pair_ms(launch: Served, image: str, seed: int) -> list[float]:
    body = image_body(launch.model, side=SIDES[image], answer=ANSWER_TOKENS, stream=True, seed=seed)
    records = [ask(launch.url, body) for _ in range(2)]
    time.sleep(STAMPS_S)  # the last ones are written after the answer
    timeline = Timeline(read_stamps(launch.traces))
    return [round(admission_s(timeline.named(record.id)) * 1e3, 4) for record in records]


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
    """`exposed_ms_1080p`, and the two times of which it is the difference. Medians."""
    named: dict[str, float] = {}
    for (image,), own in grouped(rows, "picture").items():
        pairs = [{**row, "exposed_ms": row["admission_ms"] - row["local_ms"]} for row in own]
        named |= {f"{name}_{image}": median(pairs, name) for name in ("exposed_ms", "admission_ms", "local_ms")}
    return named
