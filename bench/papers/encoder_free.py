"""What P and D weigh with and without the encoder: real stages on this host, and plans for models of real size.

Owns the models, the starts and the figures; `epd-bench memory-tables --real` asks for them. Measured are two families
with a tower that stands out of a process's own memory, with weights that vLLM draws (`--load-format dummy`): `E-P-D` as
it is, and with `--encoder-free`, each after a request with a picture. A stage's memory is the bytes that its processes
share with nobody. What cards of 80 GiB have for KV is computed, by the plan that `epd-serve layout` prints: nobody has
started these models here.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from PIL import Image

from bench.served import Served, scratch, served
from deploy.agent.cpu_time import groups
from deploy.host.processes import group_members
from deploy.memory.preview import preview
from epd_serve.demo.presets import write_checkpoint, write_preset
from epd_serve.errors import StageError
from epd_serve.layout_parser import parse
from epd_serve.model_weights import read_model_weights

MIB = 1 << 20
LAYOUT = "E-P-D"
CARD_GIB = 80.0
WITHOUT = "encoder_free"
WAYS: Mapping[str, Sequence[str]] = {"today": (), WITHOUT: ("--encoder-free",)}


@dataclass(frozen=True)
class Family:
    """One model without weights.

    Attributes:
        preset: whose folder it is made from. text, vision: what of its config differs.
    """

    name: str
    preset: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any]


_TOWER = {"hidden_size": 1024, "intermediate_size": 4096, "depth": 12, "num_heads": 16}
MEASURED = (Family("Qwen2.5-VL", "qwen2.5-vl-tiny", {}, _TOWER), Family("Qwen3-VL", "tiny", {}, _TOWER))
"""Towers of 0.2 billion parameters."""

PLANNED = (
    Family(
        "Qwen2.5-VL-7B",
        "qwen2.5-vl-tiny",
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "vocab_size": 152064,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        {
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "depth": 32,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    ),
    Family("Qwen3-VL-8B", "8b", {"vocab_size": 151936}, {}),
)
"""Sizes of their published config.json; of Qwen3-VL-8B see the preset."""


def measure(quick: bool = False) -> list[dict[str, Any]]:
    """Returns a row for each instance of each start. `quick`: of one family."""
    rows = []
    for family in MEASURED[: 1 if quick else None]:
        with family_folder(family) as folder:
            weights = read_model_weights(folder, element_bytes=2)
            assert weights is not None, "it was written just now"
            for way, flags in WAYS.items():
                print(f"starting {LAYOUT} with {family.name}, {way} …", flush=True)
                words = ["--device", "cpu", "--stage-args", "all:--load-format dummy", *flags]
                with served(LAYOUT, [str(folder), *words], traced=False) as launch:
                    _ask_about_a_picture(launch)
                    rows += [
                        {"kind": "real", "family": family.name, "way": way, "instance": name, "private_bytes": size}
                        | {"tower_bytes": weights.tower, "language_bytes": weights.language}
                        for name, size in _private_bytes(launch).items()
                    ]
    return rows


def plan() -> list[dict[str, Any]]:
    """Returns a row for each instance of each plan."""
    rows = []
    for family in PLANNED:
        with family_folder(family) as folder:
            for way in WAYS:
                free = way == WITHOUT
                _, shown = preview(parse(LAYOUT), str(folder), "cuda", CARD_GIB, (), encoder_free=free)
                names = ("weights_bytes", "activation_bytes", "kv_bytes", "kv_tokens")
                rows += [
                    {"kind": "computed", "family": family.name, "way": way, "instance": one["id"]}
                    | {name: one[name] for name in names}
                    for one in shown["instances"]
                ]
    return rows


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns `real/FAMILY/INSTANCE/…` and `plan/FAMILY/INSTANCE/…` of P and D.

    `over_today`: memory without the encoder over that with it; `tower_over_today`: the tower's weights over the same.
    `freed_over_tower`: what was freed, over the tower's weights.
    """
    found: dict[str, float] = {}
    by_way = {(row["kind"], row["family"], row["instance"], row["way"]): row for row in rows if row.get("way")}
    for (kind, family, instance, way), row in by_way.items():
        if way != WITHOUT or instance.startswith("E"):
            continue
        with_it = by_way[kind, family, instance, "today"]
        if kind == "real":
            before, after, tower = with_it["private_bytes"], row["private_bytes"], row["tower_bytes"]
            values = {
                "today_mib": before / MIB,
                "encoder_free_mib": after / MIB,
                "tower_mib": tower / MIB,
                "over_today": after / before,
                "tower_over_today": tower / before,
                "freed_over_tower": (before - after) / tower,
            }
        else:
            values = {
                "weights_over_today": row["weights_bytes"] / with_it["weights_bytes"],
                "kv_tokens_today": with_it["kv_tokens"],
                "kv_tokens_encoder_free": row["kv_tokens"],
                "kv_over_today": row["kv_tokens"] / with_it["kv_tokens"],
            }
        start = "real" if kind == "real" else "plan"
        found |= {f"{start}/{family}/{instance}/{name}": round(value, 4) for name, value in values.items()}
    return found


@contextlib.contextmanager
def family_folder(family: Family) -> Iterator[Path]:
    """The model's folder, with a checkpoint that tells sizes alone, until the context ends."""
    with scratch() as root:
        folder = root / family.name
        write_preset(folder, family.preset)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["text_config"] |= family.text
        config["text_config"].pop("layer_types", None)  # of as many layers as the preset has
        config["vision_config"] |= family.vision
        (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        write_checkpoint(folder, "hollow")
        yield folder


def _ask_about_a_picture(launch: Served) -> None:
    """So that memory that is taken with the first request is there."""
    raw = io.BytesIO()
    Image.effect_noise((224, 224), 64).save(raw, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(raw.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    body = {"model": launch.model, "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    answer = httpx.post(f"{launch.url}/v1/chat/completions", json=body, timeout=120, trust_env=False)
    if answer.status_code != 200:
        raise StageError(f"it answered {answer.status_code}: {answer.text[:200]}", stage=launch.name)


def _private_bytes(launch: Served) -> dict[str, int]:
    """By instance, of all its processes."""
    return {
        name: sum(psutil.Process(one.pid).memory_full_info().uss for one in group_members(group))
        for name, group in sorted(groups(launch.run.parent).items())
    }
