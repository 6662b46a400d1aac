"""EPD's tables 2 to 4 from real starts on this host's CPU: images of a request, batch, KV, by where the encoder is.

Owns the model, the starts, what is asked of them, and the figures; `epd-bench memory-tables --real` asks for them.

The device: memory of a CPU does not end where a card's does, so each stage gets a device of `DEVICE_BYTES`. Weights
come first, then the slab that we take for features; of the rest KV has 80 %, as in EPD's tables 2 and 3: vLLM is told
the bytes and makes blocks of them. What is left is room for activations, and the kernel sees to it: `RLIMIT_DATA` lets
the worker's process grow by that much. An allocation beyond it fails and ends the stage, as on a card. Python and its
libraries lie outside, as a host's memory does; `outside_spread_mib` says how alike that is.

The starts: `together` is one process with everything (`EPD`), `apart` is `E-PD --encoder-free`. Each encodes all images
that it has at once and prefills a prompt at once, as EPD's engine does: `--max-num-batched-tokens` cuts neither.

The model: weights and device have the proportions of InternVL2-26B on EPD's A800 (11.5 : 39.7 : 82), a 130th in size.
Its tower has two layers with a wide MLP: activations that stand out of a process's memory for little work of a core.
How much more fits follows from these sizes, as it does for the paper's models; shown is that it comes out as computed.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
import os
import re
import resource
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
from PIL import Image

from bench.model_check.memory import parse_cache_info
from bench.papers.encoder_free import Family, family_folder
from bench.served import Served, served
from deploy.agent.cpu_time import groups
from deploy.host.processes import group_members
from epd_serve.activation_peak import feature_cache, feature_slab
from epd_serve.errors import StageError
from epd_serve.model_sizes import LanguageSizes, TowerSizes, model_sizes
from epd_serve.model_weights import ModelWeights, read_model_weights

MIB = 1 << 20
DEVICE_BYTES = 600 * MIB
KV_SHARE = 0.8
ELEMENT_BYTES = 2
STEP_TOKENS = 4096
MOST_ITEMS = 512
PATCHES, IMAGE_TOKENS = 64, 16
PEAK_IMAGES = (4, 8, 16, 32)
"""Of a request, where the peak of a stage is read."""
OUTPUT_TOKENS = 24
WORDS = " word" * 60
"""What a request asks, where it is counted how many run at once."""
BATCH = 64
"""`--max-num-seqs`."""
ASK_S, ENDS_S = 240.0, 60.0
ENGINE = "EngineCore"
LOOK_S = 0.05
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(MIB), "MALLOC_TRIM_THRESHOLD_": str(MIB), "MALLOC_ARENA_MAX": "2"}
"""Memory that is freed goes back at once: what a process holds is what it uses."""
BLOCK_TOKENS = 32
LAYOUTS: Mapping[str, tuple[str, ...]] = {"together": ("EPD",), "apart": ("E-PD", "--encoder-free")}

_TEXT = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
_VISION = {"hidden_size": 512, "intermediate_size": 12288, "depth": 2, "num_heads": 8, "out_hidden_size": 512}


@dataclass(frozen=True)
class Scaled:
    """A family in the paper's proportions. `edge`: pixels of a square image of `PATCHES` patches."""

    family: Family
    edge: int


SCALED = (
    Scaled(Family("Qwen2.5-VL", "qwen2.5-vl-tiny", _TEXT, {**_VISION, "fullatt_block_indexes": [1]}), 112),
    Scaled(Family("Qwen3-VL", "tiny", _TEXT, {**_VISION, "deepstack_visual_indexes": [0]}), 128),
)


class Sizes(msgspec.Struct, frozen=True):
    """Of a model's folder. `slab_bytes`: of a worker that takes features."""

    tower: TowerSizes
    language: LanguageSizes
    weights: ModelWeights
    slab_bytes: int

    @classmethod
    def of(cls, folder: Path) -> Sizes:
        sizes = model_sizes(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        weights = read_model_weights(folder, element_bytes=ELEMENT_BYTES)
        assert sizes is not None and weights is not None, "it was written just now"
        tower = sizes.towers["vision"]
        slab = feature_slab(feature_cache(tower, STEP_TOKENS, element_bytes=ELEMENT_BYTES))
        return cls(tower, sizes.language, weights, slab)

    def taken_bytes(self, role: str, start: str) -> int:
        """Of the device, before KV: weights, and the slab."""
        with_tower, with_language = start == "together" or role == "E", role != "E"
        slab = self.slab_bytes if start == "apart" and with_language else 0
        return with_tower * self.weights.tower + with_language * self.weights.language + slab

    def kv_bytes(self, role: str, start: str) -> int:
        """That a stage's KV cache is told; 0 where it has none."""
        return 0 if role == "E" else int(KV_SHARE * (DEVICE_BYTES - self.taken_bytes(role, start)))


def families(quick: bool = False) -> list[tuple[str, Sizes]]:
    """Name and sizes of what `measure` starts."""
    found = []
    for scaled in SCALED[: 1 if quick else None]:
        with family_folder(scaled.family) as folder:
            found.append((scaled.family.name, Sizes.of(folder)))
    return found


def measure(begin: Mapping[tuple[str, str], int], quick: bool = False) -> list[dict[str, Any]]:
    """Returns rows of each start of each family: sizes, peaks, requests that ran at once, images that were too many.

    Args:
        begin: by family and start, the images of a request with which the search for the most begins.
        quick: of one family.

    Raises:
        StageError: a stage does not answer what it has to.
    """
    rows = []
    for scaled in SCALED[: 1 if quick else None]:
        with family_folder(scaled.family) as folder:
            sizes = Sizes.of(folder)
            for start, (layout, *flags) in LAYOUTS.items():
                print(
                    f"starting {layout} with {scaled.family.name} on devices of {DEVICE_BYTES // MIB} MiB …", flush=True
                )
                words = [str(folder), *_words(sizes, start), *flags]
                with served(layout, words, traced=False, env={**os.environ, **MALLOC}) as launch:
                    stages = _Stages(launch, scaled, sizes, start)
                    stages.ask(1)
                    found = [*stages.held(), *stages.concurrent(), *stages.peaks()]
                    found += stages.limits(begin[scaled.family.name, start])
                rows += [{"kind": "real", "family": scaled.family.name, "start": start} | row for row in found]
    return rows


def _words(sizes: Sizes, start: str) -> list[str]:
    common = f"--load-format dummy --limit-mm-per-prompt '{json.dumps({'image': MOST_ITEMS, 'video': 0})}'"
    common += f" --max-num-batched-tokens {STEP_TOKENS} --max-num-seqs {BATCH} --max-model-len auto"
    common += f" --block-size {BLOCK_TOKENS} --no-enable-prefix-caching --mm-processor-cache-gb 0"
    role = LAYOUTS[start][0].rpartition("-")[2]
    told = f"{role}:--kv-cache-memory-bytes {sizes.kv_bytes(role, start)}"
    return [
        "--device",
        "cpu",
        "--stage-args",
        f"all:{common}",
        "--stage-args",
        told,
        "--proxy",
        f"media.max_items={MOST_ITEMS}",
    ]


class _Stages:
    """The stages of one launch, each with its worker, which is in EngineCore's process."""

    def __init__(self, launch: Served, scaled: Scaled, sizes: Sizes, start: str) -> None:
        self._launch, self._scaled, self._sizes, self._start = launch, scaled, sizes, start
        self._roles = {stage.instance: stage.role for stage in launch.stages}
        self.last = launch.stages[-1].instance
        self._sender = threading.Thread()

    def workers(self) -> dict[str, int]:
        """By instance, the worker's pid; without those that are not up."""
        found: dict[str, int] = {}
        for name, group in groups(self._launch.run.parent).items():
            if name in self._roles:
                pids = [one.pid for one in group_members(group) if ENGINE in command_name(one.pid)]
                if pids:
                    found[name] = pids[0]
        return found

    def held(self) -> list[dict[str, Any]]:
        """What each stage has of its device, and the tokens that vLLM made of its KV cache."""
        rows = []
        for name, pid in self.workers().items():
            role = self._roles[name]
            kv = self._sizes.kv_bytes(role, self._start)
            tokens = sum(parse_cache_info(self._metrics(name)).values()) if kv else 0
            row = {"instance": name, "device_bytes": DEVICE_BYTES, "held_bytes": _status(pid, "RssAnon")}
            row |= {"taken_bytes": self._sizes.taken_bytes(role, self._start), "kv_bytes": kv, "kv_tokens": tokens}
            rows.append(row | {"outside_bytes": self.outside_bytes(name)})
        return rows

    def outside_bytes(self, name: str) -> int:
        """Of a worker's own memory, what is neither weights nor slab nor KV."""
        role = self._roles[name]
        inside = self._sizes.taken_bytes(role, self._start) + self._sizes.kv_bytes(role, self._start)
        return _status(self.workers()[name], "RssAnon") - inside

    def peaks(self) -> list[dict[str, Any]]:
        """By how much each worker grows for a request with so many images."""
        rows = []
        for images in PEAK_IMAGES:
            workers = self.workers()
            for pid in workers.values():
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
            before = {name: _status(pid, "VmRSS") for name, pid in workers.items()}
            self.ask(images)
            rows += [
                {"instance": name, "images": images, "peak_bytes": _status(pid, "VmHWM") - before[name]}
                for name, pid in workers.items()
            ]
        return rows

    def concurrent(self) -> list[dict[str, Any]]:
        """How many requests with an image run at once, each with its KV: as many as fit, and one more that does not.

        They are choices of one call, which come to the engine at one moment, however busy this machine is. Without a
        prefix cache each of them prefills the prompt and keeps it for itself.
        """
        usage = self._checked(self._ask([self._image()], WORDS, 1)).json()["usage"]
        tokens = usage["prompt_tokens"] + OUTPUT_TOKENS - 1  # the last one's KV is not kept
        blocks = sum(parse_cache_info(self._metrics(self.last)).values()) // BLOCK_TOKENS - 1  # one is vLLM's own
        guess = max(1, min(BATCH, blocks // math.ceil(tokens / BLOCK_TOKENS)))
        rows: list[dict[str, Any]] = []

        def fits(requests: int) -> bool:
            most, preempted = self._at_once(requests)
            row = {"instance": self.last, "requests": requests, "tokens": tokens, "most_running": most}
            rows.append(row | {"preempted": preempted, "fits": most == requests and not preempted})
            return bool(rows[-1]["fits"])

        largest(fits, guess, 1)
        return rows

    def limits(self, begin: int) -> list[dict[str, Any]]:
        """Requests with ever more images, on devices that end: one ends a stage, or is too long for its KV cache.

        Args:
            begin: images of the first one. Peaks lead to too many: an encoder that is slower than images come in had
                but a few of them at once.
        """
        rows: list[dict[str, Any]] = []

        def answered(images: int) -> bool:
            if rows and rows[-1]["ended"]:
                self._wait_for_all()
            for name, pid in self.workers().items():
                most = _status(pid, "VmData") + self._room(name)
                resource.prlimit(pid, resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))
            status, ended = self._ask_until_one_ends(images)
            rows.append({"images": images, "answered": status == 200 and not ended, "status": status, "ended": ended})
            return bool(rows[-1]["answered"])

        largest(answered, max(1, begin), max(1, begin // 25))
        return rows

    def ask(self, images: int) -> None:
        """A request with so many images, none of which was there before. Raises StageError where it is not answered."""
        self._checked(self._ask([self._image() for _ in range(images)]))

    def _room(self, name: str) -> int:
        role = self._roles[name]
        return DEVICE_BYTES - self._sizes.taken_bytes(role, self._start) - self._sizes.kv_bytes(role, self._start)

    def _image(self) -> str:
        raw = io.BytesIO()
        Image.effect_noise((self._scaled.edge, self._scaled.edge), 64).save(raw, "PNG")
        return f"data:image/png;base64,{base64.b64encode(raw.getvalue()).decode()}"

    def _ask(self, images: Sequence[str], text: str = "What is this?", tokens: int = 2, n: int = 1) -> httpx.Response:
        content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in images]
        message = {"role": "user", "content": [*content, {"type": "text", "text": text}]}
        body = {"model": self._launch.model, "messages": [message], "max_tokens": tokens, "ignore_eos": True, "n": n}
        return httpx.post(f"{self._launch.url}/v1/chat/completions", json=body, timeout=ASK_S, trust_env=False)

    def _checked(self, answer: httpx.Response) -> httpx.Response:
        if answer.status_code != 200:
            said = f"it answered {answer.status_code}: {answer.text[:200]}"
            raise StageError(said, stage=self._launch.name)
        return answer

    def _ask_until_one_ends(self, images: int) -> tuple[int, str]:
        """The answer's status, and which instance's worker ended meanwhile, if one did: 0 where there was no answer.

        Raises StageError for an answer that says neither that it is too long (400) nor comes of a stage's end.
        """
        urls = [self._image() for _ in range(images)]
        workers, status = self.workers(), [0]

        def send() -> None:
            with contextlib.suppress(httpx.HTTPError):  # it went with the stage
                status[0] = self._ask(urls).status_code

        self._sender = sender = threading.Thread(target=send, daemon=True)
        sender.start()
        ended, until = "", time.monotonic() + ASK_S
        while not ended and status[0] not in (200, 400) and time.monotonic() < until:
            sender.join(LOOK_S)
            if not sender.is_alive():
                until = min(until, time.monotonic() + ENDS_S)
                time.sleep(LOOK_S)
            ended = next((name for name, pid in workers.items() if ENGINE not in command_name(pid)), "")
        if not ended and status[0] not in (200, 400):
            raise StageError(f"{images} images were answered with {status[0]}", stage=self._launch.name)
        return status[0], ended

    def _wait_for_all(self) -> None:
        """Until who ended is back and answers, and what ended it is over. Raises StageError after `ASK_S`."""
        until = time.monotonic() + ASK_S
        self._sender.join(ASK_S)
        while time.monotonic() < until:
            time.sleep(1.0)
            if len(self.workers()) == len(self._roles):
                with contextlib.suppress(httpx.HTTPError, StageError):
                    self.ask(1)
                    return
        raise StageError("a stage that ended did not come back", stage=self._launch.name)

    def _at_once(self, requests: int) -> tuple[int, int]:
        """The most that ran at once of so many requests, and how often one was preempted."""
        before, most = self._number("num_preemptions_total"), 0.0
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(self._ask, [self._image()], WORDS, OUTPUT_TOKENS, requests)
            while not sent.done():
                most = max(most, self._number("num_requests_running"))
                time.sleep(LOOK_S)
        self._checked(sent.result())
        return int(most), int(self._number("num_preemptions_total") - before)

    def _number(self, name: str) -> float:
        found = re.findall(rf"^vllm:{name}(?:\{{[^}}]*\}})? (\S+)$", self._metrics(self.last), re.MULTILINE)
        return sum(map(float, found))

    def _metrics(self, name: str) -> str:
        url = self._launch.stage_url(self._roles[name])
        assert url is not None, f"{name} is one of its stages"
        with httpx.Client(transport=httpx.HTTPTransport(uds=url.removeprefix("unix:")), timeout=ASK_S) as client:
            return self._checked(client.get("http://stage/metrics")).text


def largest(holds: Callable[[int], bool], guess: int, step: int) -> int:
    """The largest number found for which it holds, within `step`; 0 where none does. Each number is asked once."""
    low, high, number = 0, None, guess
    while high is None or high - low > step:
        if holds(number):
            low = number
        else:
            high = number
        if high is None:
            number = low + step
        elif low:
            number = (low + high) // 2
        else:
            number = max(1, high - max(step, high // 8))
        if number == high:
            break
    return low


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns `real/tableN/FAMILY/…`, and `computed/tableN/FAMILY/…` of what was computed beside it.

    `together`: one process with everything. `encoder_free`: E apart, prefill and decode without the encoder. Of both
    there is the latter over the former. `kv_share`: KV's largest share of the free memory beside a request of so many
    images, 0 where that does not fit at all. `outside_spread_mib`: by how much stages differ in what lies outside of
    their devices, which all that is compared here rests on.
    """
    found: dict[str, float] = {}
    rows = [row for row in rows if "start" in row or "values" in row]
    for family in dict.fromkeys(row["family"] for row in rows if "start" in row):
        own = [row for row in rows if row["family"] == family]
        held = [row for row in own if "held_bytes" in row]
        for start, name in (("together", "together"), ("apart", "encoder_free")):
            mine = [row for row in own if row.get("start") == start]
            (stage,) = (row for row in held if row["start"] == start and row["kv_tokens"])
            answered = [row["images"] for row in mine if row.get("answered")]
            at_once = [row["requests"] for row in mine if row.get("fits")]
            found[f"real/table2/{family}/max_images_{name}"] = max(answered, default=0)
            found[f"real/table3/{family}/batch_requests_{name}"] = max(at_once, default=0)
            found[f"real/table4/{family}/kv_tokens_{name}"] = stage["kv_tokens"]
            free = DEVICE_BYTES - stage["taken_bytes"]
            for row in (row for row in mine if "peak_bytes" in row and row["instance"] == stage["instance"]):
                share = max(0.0, 1 - row["peak_bytes"] / free)
                found[f"real/table4/{family}/kv_share/{row['images']} pictures/{name}"] = round(share, 4)
        for row in (row for row in own if "values" in row):
            found |= {f"computed/table{key.replace('FAMILY', family)}": value for key, value in row["values"].items()}
        outside = [row["outside_bytes"] for row in held]
        found[f"real/devices/{family}/outside_spread_mib"] = round((max(outside) - min(outside)) / MIB, 1)
    for name, value in list(found.items()):
        base = name.removesuffix("_together")
        if base != name and value and f"{base}_encoder_free" in found:
            found[f"{base}_encoder_free_over_together"] = round(found[f"{base}_encoder_free"] / value, 4)
    return found


def _status(pid: int, field: str) -> int:
    """Bytes, of /proc/PID/status."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) << 10


def command_name(pid: int) -> str:
    """As the kernel has it; "" of a process that has ended."""
    try:
        process = psutil.Process(pid)
        return "" if process.status() == psutil.STATUS_ZOMBIE else process.name()
    except psutil.NoSuchProcess:
        return ""
