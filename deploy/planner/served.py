"""A layout that is served for a profile, and a client that sends it what no two times is alike.

Owns the launch (`epd-serve serve` in a process of its own, ended with the context), the requests, and the reading of
what the launch says. What is sent, and what follows from it, is decided elsewhere.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from deploy.agent.cpu_time import cpu_seconds, groups, parts, since
from deploy.host.ports import free_ports
from deploy.host.started import ENDS, started
from deploy.planner.steps import Sent
from epd_serve.errors import StageError

START_S, STOP_S, ANSWER_S = 900.0, 60.0, 300.0
_IDS = range(100, 400)
"""Token ids of prompts: plain tokens in every vocabulary; 300 of them make prompts that have no block in common."""


@dataclass
class Launched:
    """A layout that is ready, to one client.

    Attributes:
        url: of the proxy. model: its name there. start_s: from the process to readiness. traces: of its stages.
        run: where its processes are written down. launcher: the pid of `serve`.
    """

    url: str
    model: str
    start_s: float
    traces: Path
    run: Path
    launcher: int
    http: httpx.Client
    max_model_len: int = 0
    _chance: random.Random = field(default_factory=lambda: random.Random(1))

    def ids(self, count: int) -> list[int]:
        """A prompt of so many tokens, unlike any other."""
        return self._chance.choices(_IDS, k=count)

    def text(self, ids: Sequence[int], tokens: int = 1) -> Sent:
        """Have a prompt answered with so many tokens."""
        body = {"prompt": list(ids), "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
        return self._sent("/v1/completions", body, tokens)

    def image(self, side: int, tokens: int = 1) -> Sent:
        """The same about a square picture of `side` pixels, unlike any other, that compresses as photographs do."""
        body = {**self._about([(side, side)], "What is it?"), "max_tokens": tokens, "ignore_eos": True}
        return self._sent("/v1/chat/completions", body, tokens)

    def streamed(self, sizes: Sequence[tuple[int, int]], text_tokens: int, tokens: int) -> list[float]:
        """Have a request streamed, with pictures of these widths and heights: when each event with content was read."""
        text = self.ids(max(1, text_tokens))
        asked: dict[str, Any] = {"prompt": text}
        if sizes:
            asked = self._about(sizes, " ".join("what" for _ in text))
        came = self._stream(asked, tokens)
        if not came:
            raise StageError("a request was answered with nothing", stage="proxy")
        return came

    def _about(self, sizes: Sequence[tuple[int, int]], words: str) -> dict[str, Any]:
        pictures = [{"type": "image_url", "image_url": {"url": _url(*size, self._chance)}} for size in sizes]
        return {"messages": [{"role": "user", "content": [*pictures, {"type": "text", "text": words}]}]}

    def _stream(self, asked: dict[str, Any], tokens: int) -> list[float]:
        """When each event with tokens was read, also those without text. Raises StageError: it is refused."""
        path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
        usual = {"model": self.model, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
        came: list[float] = []
        with self.http.stream("POST", path, json={**usual, "max_tokens": tokens, **asked}) as answer:
            if answer.status_code != 200:
                raise StageError(f"a request was answered with {answer.status_code}: {answer.read()!r}", stage="proxy")
            for line in _lines(answer.iter_bytes()):
                choices = json.loads(line[6:]).get("choices") if line.startswith(b"data: {") else None
                if choices and choices[0].get("token_ids"):
                    came.append(time.monotonic())
        return came

    def together(self, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        """Have the answers to all prompts streamed at a time: who reads along is part of what a step takes."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(lambda ids: self._stream({"prompt": list(ids)}, tokens), prompts))

    def stages(self) -> list[dict[str, Any]]:
        """What the schedulers of all instances report; those that have not yet are left out."""
        table = self.http.get("/instances").raise_for_status().json()["instances"]
        return [one["stage"] for one in table if one["stage"] is not None]

    @contextlib.contextmanager
    def cpu(self) -> Iterator[list[float]]:
        """CPU seconds, put into the list at the end, of all processes of the launch but the engines."""
        spent: list[float] = []
        processes = parts(self.launcher, groups(self.run))
        front = {name: pids for name, pids in processes.items() if not name.endswith("/engine")}
        before = cpu_seconds(front)
        yield spent
        spent.append(sum(since(before, cpu_seconds(front)).values()))

    def _sent(self, path: str, body: dict[str, Any], tokens: int) -> Sent:
        begun = time.monotonic()
        answer = self.http.post(path, json={"model": self.model, "temperature": 0, **body})
        ended = time.monotonic()
        if answer.status_code != 200:
            raise StageError(f"{path} was answered with {answer.status_code}: {answer.text[:500]}", stage="proxy")
        return Sent(begun, ended, tokens)


@contextlib.contextmanager
def launched(layout: str, flags: Sequence[str]) -> Iterator[Launched]:
    """Serve `layout` until the context ends, with traces. `flags`: more of `epd-serve serve`, the model too.

    Raises:
        StageError: it ended before it was ready, or took longer than `START_S`, with the end of its log; or it stopped
            answering.
    """
    with tempfile.TemporaryDirectory(prefix="epd-profile-") as made:
        folder, (port,) = Path(made), free_ports(1)
        said, run = folder / "said", folder / "run"
        argv = [sys.executable, "-m", "deploy.cli", "serve", "--layout", layout, "--port", str(port)]
        argv += ["--run-root", str(run), "--trace-dir", str(folder / "traces"), "--lame-duck-s", "0", *flags]
        begun = time.monotonic()
        with started(argv, folder / "log", name=layout, out=said, stop_s=STOP_S) as process:
            process.ready(lambda: ENDS in said.read_text(encoding="utf-8"), START_S)
            start_s = time.monotonic() - begun
            with _client(f"http://127.0.0.1:{port}") as http:
                (model, *_) = http.get("/v1/models").raise_for_status().json()["data"]
                yield Launched(
                    str(http.base_url),
                    model["id"],
                    start_s,
                    folder / "traces",
                    run,
                    process.process.pid,
                    http,
                    model.get("max_model_len") or 0,
                )


@contextlib.contextmanager
def _client(url: str) -> Iterator[httpx.Client]:
    try:
        with httpx.Client(base_url=url, timeout=ANSWER_S, trust_env=False) as http:
            yield http
    except httpx.HTTPError as error:
        raise StageError(f"{url} does not answer: {type(error).__name__} {error}", stage="proxy") from error


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Of a stream of events. httpx's own also end at the separators of Unicode, which answers may have."""
    left = b""
    for piece in pieces:
        *lines, left = (left + piece).split(b"\n")
        yield from lines


def _url(width: int, height: int, chance: random.Random) -> str:
    """A JPEG of blocks of random brightness, smoothed, as a data URL."""
    small = max(2, width // 16), max(2, height // 16)
    pixels = Image.frombytes("RGB", small, chance.randbytes(3 * small[0] * small[1]))
    file = io.BytesIO()
    pixels.resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
