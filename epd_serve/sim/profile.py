"""How long a simulated stage takes for what, and how much it holds: the profile file (JSON), read and checked once.

Latencies are straight lines (a + b·amount) and a table for decode steps; `docs/guides/simulation.md` shows a whole
file. A stage without a profile takes no time for anything.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from epd_serve.errors import ConfigError


@dataclass(frozen=True)
class Line:
    """Seconds for an amount: `setup_s` + `per_unit_s` · amount, where there is an amount."""

    setup_s: float = 0.0
    per_unit_s: float = 0.0

    def seconds(self, amount: float) -> float:
        return self.setup_s + self.per_unit_s * amount if amount > 0 else 0.0


@dataclass(frozen=True)
class Capacity:
    """What a stage holds at once. What does not fit waits.

    Attributes:
        max_running: sequences that run together (vLLM's `--max-num-seqs`).
        step_tokens: prompt tokens and decoded tokens of one step (`--max-num-batched-tokens`); prompts are cut there.
        kv_tokens: of the KV cache; block_tokens: its granularity.
        max_model_len: longest prompt with its answer; longer ones are refused.
        encoder_tokens: item tokens that one step encodes. An item is never cut: a larger one has a step to itself.
    """

    max_running: int = 256
    step_tokens: int = 8192
    kv_tokens: int = 262_144
    block_tokens: int = 32
    max_model_len: int = 32_768
    encoder_tokens: int = 16_384


@dataclass(frozen=True)
class Profile:
    """One kind of stage.

    Attributes:
        encode: by item tokens of a step; prefill: by prompt tokens of a step; kv: by bytes of a transfer.
        decode_step_s: seconds of a decode step by batch size, as [[1, 0.02], [64, 0.03]]: straight between the points,
            and on from the last one as between the last two.
        jitter: each step takes 1 ± jitter of that. seed: of the draws; instances differ by their names.
        output_tokens: length of an answer that nothing bounds.
        item_tokens: of an item whose size cannot be read from its header.
        feature_bytes_per_token: an encoder stores as much; kv_bytes_per_token: a transfer moves as much.
    """

    encode: Line = Line()
    prefill: Line = Line()
    kv: Line = Line()
    decode_step_s: tuple[tuple[float, float], ...] = ()
    jitter: float = 0.0
    seed: int = 0
    capacity: Capacity = field(default_factory=Capacity)
    output_tokens: int = 64
    item_tokens: int = 256
    feature_bytes_per_token: int = 7168
    kv_bytes_per_token: int = 57_344

    def decode_s(self, batch: int) -> float:
        """Seconds of one decode step of `batch` sequences."""
        points = self.decode_step_s
        if not points or batch <= 0:
            return 0.0
        at = bisect.bisect_left(points, (batch, 0.0))
        if len(points) == 1 or at == 0:
            return points[0][1]
        (x0, y0), (x1, y1) = points[at - 1 : at + 1] if at < len(points) else points[-2:]
        return max(0.0, y0 + (y1 - y0) * (batch - x0) / (x1 - x0))

    def step_parts_s(self, item_tokens: int, prompt_tokens: int, decodes: int) -> tuple[float, float, float]:
        """Seconds of encode, prefill and decode in one step: the encoder runs first, then one batch of the rest."""
        return self.encode.seconds(item_tokens), self.prefill.seconds(prompt_tokens), self.decode_s(decodes)

    def factors(self, instance: str) -> Callable[[], float]:
        """The draws of `instance`: the same ones in every run."""
        chance = random.Random(f"{self.seed}/{instance}")
        return lambda: 1.0 + self.jitter * chance.uniform(-1.0, 1.0)


def read_profile(path: str) -> Profile:
    """The file's profile; "" is the one that takes no time.

    Raises:
        ConfigError: names the key and the fix.
    """
    if not path:
        return Profile()
    try:
        raw = msgspec.json.decode(Path(path).read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"simulation profile {path}: {error}", param="--sim-profile") from error
    try:
        return _checked(_built(Profile, raw, ""))
    except ValueError as error:
        raise ConfigError(f"simulation profile {path}: {error}", param="--sim-profile") from error


def _built(kind: type[Any], raw: object, where: str) -> Any:
    if not isinstance(raw, dict):
        raise ValueError(f"{where or 'it'} has to be an object")
    types = get_type_hints(kind)
    values: dict[str, Any] = {}
    known = [one.name for one in fields(kind)]
    for name, value in raw.items():
        if name == "comment":
            continue
        if name not in known:
            close = get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]}" if close else f"; it has {', '.join(known)}"
            raise ValueError(f"{where}{name} is unknown{hint}")
        if is_dataclass(types[name]):
            assert isinstance(types[name], type)
            values[name] = _built(types[name], value, f"{where}{name}.")
        elif name == "decode_step_s":
            values[name] = _points(value)
        else:
            values[name] = _number(value, types[name], where + name)
    return kind(**values)


def _number(value: object, kind: type, where: str) -> float | int:
    right = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, right) or value < 0:
        raise ValueError(f"{where} is {value!r}; it has to be a number from 0 on{' without fraction' * (kind is int)}")
    number: float | int = kind(value)
    return number


def _points(value: object) -> tuple[tuple[float, float], ...]:
    pairs = isinstance(value, list) and all(isinstance(one, list) and len(one) == 2 for one in value)
    if not pairs:
        raise ValueError("decode_step_s has to be a list of [batch size, seconds]")
    assert isinstance(value, list)
    points = tuple((_number(x, float, "decode_step_s"), _number(y, float, "decode_step_s")) for x, y in value)
    if any(one[0] >= other[0] for one, other in itertools.pairwise(points)):
        raise ValueError("decode_step_s has to name growing batch sizes")
    return points


def _checked(profile: Profile) -> Profile:
    if profile.jitter > 1:
        raise ValueError(f"jitter is {profile.jitter}; it has to lie between 0 and 1")
    for name in ("max_running", "step_tokens", "kv_tokens", "block_tokens", "max_model_len", "encoder_tokens"):
        if getattr(profile.capacity, name) < 1:
            raise ValueError(f"capacity.{name} has to be at least 1")
    for name in ("output_tokens", "item_tokens", "feature_bytes_per_token"):
        if getattr(profile, name) < 1:
            raise ValueError(f"{name} has to be at least 1")
    return profile
