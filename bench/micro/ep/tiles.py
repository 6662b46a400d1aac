"""How long a 4K image takes to its first token where two encoders share its tiles, over one. Part of `transfer ep`.

Two launches of 2E-PD are up at once and asked in turns, each time about a new image: one cuts images in two, the other
has `--proxy image_parts=1`. So what slows the machine down meets both.

    real        an InternVL with a small tower (weights are of no interest, and are made up by vLLM): 12 tiles of 448
                and a thumbnail, 3,328 tokens. On CPU each encoder computes on a core of its own.
    simulated   stages that take as long as they are told: a second for the whole tower, a quarter for the prefill

What halves is the tower. vLLM's processor takes its time at each encoder, and at P, which gets the image as well since
nothing stands in for an InternVL image; `tower_ms` says how much of a request the tower is.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from PIL import Image

from bench.clients.sender import ask
from bench.micro.measurement import Goal, Row, in_turns
from bench.micro.rows import grouped, median, quartiles, ratios
from bench.served import Served, scratch, served, simulated
from epd_serve.demo.presets import write_preset
from epd_serve.phases.stamps import Stamp, Timeline, read_stamps

LAYOUT = "2E-PD"
WIDTH, HEIGHT = 4032, 3024  # EPD's 4K
TILE, TILES, PATCH = 448, 12, 14
TOKENS = (TILE // PATCH // 2) ** 2
TOWER = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_hidden_layers": 4}
MAX_TOKENS = 8192
STAGE_ARGS = (
    f"all:--dtype float32 --load-format dummy --max-model-len {MAX_TOKENS} --max-num-batched-tokens {MAX_TOKENS}"
    """ --max-num-seqs 4 --limit-mm-per-prompt '{"image": 1, "video": 0}'"""
)
WHOLE_S, PREFILL_S = 1.0, 0.25
SIM_TOKENS = WIDTH * HEIGHT / 28**2
PROFILE = {"encode": {"per_unit_s": WHOLE_S / SIM_TOKENS}, "prefill": {"per_unit_s": PREFILL_S / SIM_TOKENS}}
ALONE, SHARED = 1, 2
PARTS = {ALONE: 1, SHARED: 2}
STAMPS_S = 0.5
LIMIT_S = 300.0
GOALS = (Goal("tile_ttft_over_one", "<=", 0.7, "two encoders halve the tower of a 4K image"),)


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """A row of each request. The first one of each launch is not counted."""
    with scratch() as folder:
        model = tiling_model(folder / "model")
        for kind, launched in (("simulated", _simulated), ("real", _real)):
            with ExitStack() as up:
                launches = {of: up.enter_context(launched(model, parts)) for of, parts in PARTS.items()}
                for launch in launches.values():
                    _asked(launch, 0)
                for turn, of in in_turns([*PARTS], arguments.rounds, arguments.budget_s):
                    yield {"kind": kind, "round": turn, "encoders": of, **_asked(launches[of], turn + 1)}


def tiling_model(folder: Path) -> Path:
    """An InternVL whose tiles have the usual size and number, without weights that fit it."""
    write_preset(folder, "internvl-tiny")
    size = {"height": TILE, "width": TILE}
    changes: Mapping[str, Mapping[str, Any]] = {
        "config.json": {"image_seq_length": TOKENS},
        "preprocessor_config.json": {"size": size, "max_patches": TILES},
        "video_preprocessor_config.json": {"size": size},
        "processor_config.json": {"image_seq_length": TOKENS},
    }
    for name, change in changes.items():
        content = json.loads((folder / name).read_text()) | change
        if name == "config.json":
            content["vision_config"] |= {**TOWER, "image_size": [TILE, TILE]}
        (folder / name).write_text(json.dumps(content))
    return folder


def _real(model: Path, parts: int) -> AbstractContextManager[Served]:
    return served(LAYOUT, [str(model), "--stage-args", STAGE_ARGS, "--proxy", f"image_parts={parts}"])


def _simulated(model: Path, parts: int) -> AbstractContextManager[Served]:
    return simulated(LAYOUT, PROFILE, [str(model), "--proxy", f"image_parts={parts}"])


def _asked(launch: Served, seed: int) -> Row:
    record = ask(launch.url, image_body(launch.model, seed), LIMIT_S)
    if not launch.traces.is_dir():
        return {"ttft_ms": _ms(record.ttft_s)}
    time.sleep(STAMPS_S)  # the last ones are written after the answer
    return {
        "ttft_ms": _ms(record.ttft_s),
        "tower_ms": _ms(tower_s(Timeline(read_stamps(launch.traces)).named(record.id))),
    }


def image_body(model: str, seed: int) -> dict[str, Any]:
    """A question about a 4K JPEG that no other seed gives."""
    data = io.BytesIO()
    Image.radial_gradient("L").resize((WIDTH, HEIGHT)).convert("RGB").save(data, "JPEG", comment=f"{seed}".encode())
    url = f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    asked = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 2, "temperature": 0}
    return {**asked, "stream": True}


def tower_s(stamps: Sequence[Stamp]) -> float:
    """From the first encoder's step to the last one's end."""
    begun = [stamp.t for stamp in stamps if stamp.event == "encode_start"]
    ended = [stamp.t for stamp in stamps if stamp.event == "encoded" and stamp.instance.startswith("E")]
    return max(ended) - min(begun) if begun and ended else 0.0


def _ms(seconds: float | None) -> float:
    return round(1e3 * (seconds or 0.0), 2)


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """`tile_ttft_over_one`, with its quartiles, round by round, and times. Of simulated stages they end in that."""
    named: dict[str, float] = {}
    for (kind,), own in grouped(rows, "kind").items():
        end = "" if kind == "real" else f"_{kind}"
        by = {of: them for (of,), them in grouped(own, "encoders").items()}
        if over := ratios(by.get(SHARED, ()), by.get(ALONE, ()), "ttft_ms"):
            named |= {f"{name}{end}": value for name, value in quartiles("tile_ttft_over_one", over).items()}
        for of, them in by.items():
            timed = [name for name in ("ttft_ms", "tower_ms") if all(name in row for row in them)]
            named |= {f"tile_{name}_{of}{end}": round(median(them, name), 2) for name in timed}
    return named
