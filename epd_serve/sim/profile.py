"""How long a stage takes for what, and how much it holds: read and checked once.

A simulated stage takes it from a file (`--sim-profile`; `docs/guides/simulation.md` shows a whole one), the planner
from the profile of a device (`deploy/planner/profile.py`). Latencies are straight lines (a + b·amount) and a table for
decode steps. A stage without a profile takes no time for anything.
"""

from __future__ import annotations

import bisect
import itertools
import random
import re
from collections.abc import Callable, Collection
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from epd_serve.errors import ConfigError
from epd_serve.roles import Role

Seconds = Annotated[float, Meta(ge=0)]
Some = Annotated[int, Meta(ge=1)]
T = TypeVar("T")
_UNKNOWN = re.compile(r"unknown field `(\w+)`")


class Line(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Seconds for an amount: `setup_s` + `per_unit_s` · amount, where there is an amount."""

    setup_s: Seconds = 0.0
    per_unit_s: Seconds = 0.0

    def seconds(self, amount: float) -> float:
        return self.setup_s + self.per_unit_s * amount if amount > 0 else 0.0


class Capacity(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a stage holds at once. What does not fit waits.

    Attributes:
        max_running: sequences that run together (vLLM's `--max-num-seqs`).
        step_tokens: prompt tokens and decoded tokens of one step (`--max-num-batched-tokens`); prompts are cut there.
        kv_tokens: of the KV cache; block_tokens: its granularity.
        max_model_len: longest prompt with its answer; longer ones are refused.
        encoder_tokens: item tokens that one step encodes. An item is never cut: a larger one has a step to itself.
        long_prompt_tokens: where stages only prefill, a prompt with more leaves others their parts of a step while
            there are others (`--long-prefill-token-threshold`, adaptive).
    """

    max_running: Some = 256
    step_tokens: Some = 8192
    kv_tokens: Some = 262_144
    block_tokens: Some = 32
    max_model_len: Some = 32_768
    encoder_tokens: Some = 16_384
    long_prompt_tokens: Some = 512


class Profile(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One kind of stage.

    Attributes:
        encode: by item tokens of a step; prefill: by prompt tokens of a step; kv: by bytes of a transfer.
        encode_context_s: added for each item token, by each token of its item (attention of the encoder).
        prefill_context_s: added for each prompt token, by each token before it (attention).
        decode_step_s: seconds of a decode step by batch size, as [[1, 0.02], [64, 0.03]]: straight between the points,
            and on from the last one as between the last two.
        decode_kv_s: added for each token of KV that the batch has.
        jitter: each step takes 1 ± jitter of that. seed: of the draws; instances differ by their names.
        output_tokens: length of an answer that nothing bounds.
        item_tokens: of an item whose size cannot be read from its header.
        feature_bytes_per_token: an encoder stores as much; kv_bytes_per_token: a transfer moves as much.
        start_s: by role, what a simulated stage waits before it serves; 0 where the role is not in it.
        comment: for people.
    """

    encode: Line = Line()
    prefill: Line = Line()
    kv: Line = Line()
    encode_context_s: Seconds = 0.0
    prefill_context_s: Seconds = 0.0
    decode_step_s: tuple[tuple[Seconds, Seconds], ...] = ()
    decode_kv_s: Seconds = 0.0
    jitter: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: int = 0
    capacity: Capacity = Capacity()
    output_tokens: Some = 64
    item_tokens: Some = 256
    feature_bytes_per_token: Some = 7168
    kv_bytes_per_token: Annotated[int, Meta(ge=0)] = 57_344
    start_s: dict[Role, Seconds] = {}
    comment: str = ""

    def __post_init__(self) -> None:
        if any(one[0] >= other[0] for one, other in itertools.pairwise(self.decode_step_s)):
            raise ValueError("decode_step_s has to name growing batch sizes")

    def decode_s(self, batch: int, kv_tokens: float = 0.0) -> float:
        """Seconds of one decode step of `batch` sequences, which have so many tokens of KV together."""
        points = self.decode_step_s
        if not points or batch <= 0:
            return 0.0
        kv_s = self.decode_kv_s * kv_tokens
        at = bisect.bisect_left(points, (batch, 0.0))
        if len(points) == 1 or at == 0:
            return points[0][1] + kv_s
        (x0, y0), (x1, y1) = points[at - 1 : at + 1] if at < len(points) else points[-2:]
        return max(0.0, y0 + (y1 - y0) * (batch - x0) / (x1 - x0)) + kv_s

    def step_parts_s(
        self,
        item_tokens: int,
        prompt_tokens: int,
        decodes: int,
        *,
        item_pairs: float | None = None,
        context_tokens: float = 0.0,
        kv_tokens: float = 0.0,
    ) -> tuple[float, float, float]:
        """Seconds of encode, prefill and decode in one step: the encoder runs first, then one batch of the rest.

        Args:
            item_pairs: sum, over the items, of their tokens squared; None: it is one item.
            context_tokens: sum, over the prompt tokens, of the tokens before each. kv_tokens: of the decodes.
        """
        prefill_s = self.prefill.seconds(prompt_tokens) + self.prefill_context_s * context_tokens
        pairs = item_tokens**2 if item_pairs is None else item_pairs
        encode_s = self.encode.seconds(item_tokens) + self.encode_context_s * pairs
        return encode_s, prefill_s, self.decode_s(decodes, kv_tokens)

    def factors(self, instance: str) -> Callable[[], float]:
        """The draws of `instance`: the same ones in every run."""
        if not self.jitter:
            return lambda: 1.0
        chance = random.Random(f"{self.seed}/{instance}")
        return lambda: 1.0 + self.jitter * chance.uniform(-1.0, 1.0)


class _Device(Struct):
    """What simulated stages take of the profile of a device."""

    stages: dict[str, object]
    start_s: Seconds = 0.0


def read_profile(path: str) -> Profile:
    """The file's profile; of a device's (`deploy/planner/profile.py`) that of its stages on one device each, each role
    of which starts in the device's time unless it says otherwise itself. "" is the one that takes no time.

    Raises:
        ConfigError: names the key and the fix.
    """
    if not path:
        return Profile()
    what = f"simulation profile {path}"
    raw = read_object(Path(path), what, "--sim-profile")
    if "stages" not in raw:
        return checked(Profile, raw, what, "--sim-profile")
    device = checked(_Device, raw, what, "--sim-profile")
    if "1" not in device.stages:
        raise ConfigError(f"{what}: stages has no profile for 1 device", param="--sim-profile")
    stage = checked(Profile, device.stages["1"], what, "--sim-profile")
    return replace(stage, start_s=dict.fromkeys(Role, device.start_s) | stage.start_s)


def read_object(path: Path, what: str, flag: str) -> dict[str, object]:
    """A JSON object. Raises ConfigError that begins with `what` and names `flag`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{what}: {error}", param=flag) from error


def checked(kind: type[T], raw: object, what: str, flag: str) -> T:
    """`raw` as a `kind`. Raises ConfigError that names the place, and of an unknown key the nearest known one."""
    try:
        return msgspec.convert(raw, kind, str_keys=True)
    except msgspec.ValidationError as error:
        unknown = _UNKNOWN.search(str(error))
        close = get_close_matches(unknown[1], _keys(kind), 1) if unknown else []
        hint = f"; did you mean {close[0]}" if close else ""
        raise ConfigError(f"{what}: {error}{hint}", param=flag) from error


def _keys(kind: type) -> Collection[str]:
    """Of a struct and of those in it."""
    found: dict[str, None] = {}
    kinds = [kind]
    for one in kinds:
        for field in msgspec.structs.fields(one):
            found[field.name] = None
            kinds += [inner for inner in _structs(field.type) if inner not in kinds]
    return found


def _structs(kind: object) -> list[type]:
    """Structs that a field's type names, whatever holds them."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        return [kind]
    return [inner for one in getattr(kind, "__args__", ()) for inner in _structs(one)]
