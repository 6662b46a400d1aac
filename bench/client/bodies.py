"""The bodies of a run, made before it: making them meanwhile would take the time that is measured.

They lie in an unlinked file that is mapped into memory, since 100 requests with eight 4K pictures are gigabytes; what
was written just now is served from the page cache.
"""

from __future__ import annotations

import json
import mmap
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from bench.client.target import Ask
from bench.workloads.spec import PictureRef, RequestSpec
from epd_serve.errors import ConfigError

DataUrl = Callable[[PictureRef], str]
"""Of a picture, as `image_url` takes it."""


def chat_body(spec: RequestSpec, model: str, data_url: DataUrl) -> dict[str, Any]:
    """The request as OpenAI's chat completions have it; the answer is streamed, counted, and of exactly that length."""
    content: list[dict[str, Any]] = []
    for picture in spec.pictures:
        content.append({"type": "image_url", "image_url": {"url": data_url(picture)}})
    content.append({"type": "text", "text": spec.text})
    return streamed(
        {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": spec.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
    )


def streamed(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body, asking for a stream that ends with its usage."""
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


def spec_bodies(specs: Iterable[RequestSpec], model: str, data_url: DataUrl) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, body) of each request of a workload. Raises what `data_url` does of a picture that it cannot read."""
    for spec in specs:
        yield spec.id, chat_body(spec, model, data_url)


def file_bodies(path: Path, model: str | None) -> list[tuple[str, dict[str, Any]]]:
    """(line, body) of a file with one request body per line, to be sent as they are, but streamed.

    Args:
        model: where a body names none.

    Raises:
        ConfigError: unreadable, empty, or a line that is no JSON object; with its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--bodies {path} cannot be read: {error}", param="--bodies") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            body = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}:{number} is no JSON: {error}", param="--bodies") from None
        if not isinstance(body, dict):
            raise ConfigError(f"{path}:{number} is no JSON object: one request body per line", param="--bodies")
        found.append((f"{path.name}:{number}", streamed({"model": model, **body} if model else body)))
    if not found:
        raise ConfigError(f"--bodies {path} has no request", param="--bodies")
    return found


@contextmanager
def prepared(bodies: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[list[Ask]]:
    """Asks whose bodies lie ready, for the time of the context.

    Raises:
        ConfigError: the disk has no room for them, or there is none.
    """
    with tempfile.TemporaryFile(prefix="epd-bench-bodies-") as file:
        try:
            made = _write(file, bodies)
        except OSError as error:
            raise ConfigError(
                f"the bodies of the requests cannot be written to {tempfile.gettempdir()}: {error.strerror}; "
                "set TMPDIR to a folder with more room, or send fewer requests",
                param="--n",
            ) from error
        if not made:
            raise ConfigError("there is no request to send", param="--workload")
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        at, asks = 0, []
        for spec, nbytes, expected in made:
            asks.append(Ask(spec, whole[at : at + nbytes], expected))
            at += nbytes
        yield asks  # the mapping ends with its last view


def _write(file: IO[bytes], bodies: Iterable[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, int, int | None]]:
    """(name, bytes, tokens that the answer has to have) of each body, in the order in which they lie in the file."""
    made = []
    for name, body in bodies:
        raw = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        file.write(raw)
        asked = body.get("max_tokens") or body.get("max_completion_tokens")
        made.append((name, len(raw), asked if body.get("ignore_eos") and isinstance(asked, int) else None))
    file.flush()
    return made
