"""The bodies of a run, made before it: making them meanwhile would take the time that is measured.

They lie in memory, as far as that goes, and then in an unlinked file that is mapped: 100 requests with eight 4K
pictures are gigabytes. Not all in the file, since a kernel that reclaims cold pages takes them from the page cache
within a minute, and a generator that reads a body from the disk is late by the time that it takes.
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

HELD_BYTES = 1 << 30
"""Bodies held in memory: some 1000 requests with a picture each."""
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
def prepared(bodies: Iterable[tuple[str, Mapping[str, Any]]], held_bytes: int = HELD_BYTES) -> Iterator[list[Ask]]:
    """Asks whose bodies lie ready, for the time of the context; the first `held_bytes` of them in memory.

    Raises:
        ConfigError: the disk has no room for the others, or there is none.
    """
    with tempfile.TemporaryFile(prefix="epd-bench-bodies-") as file:
        try:
            made = _made(file, bodies, held_bytes)
        except OSError as error:
            raise ConfigError(
                f"the bodies of the requests cannot be written to {tempfile.gettempdir()}: {error.strerror}; "
                "set TMPDIR to a folder with more room, or send fewer requests",
                param="--n",
            ) from error
        if not made:
            raise ConfigError("there is no request to send", param="--workload")
        filed = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if file.tell() else memoryview(b"")
        yield [
            Ask(spec, body if isinstance(body, bytes) else filed[body], expected) for spec, body, expected in made
        ]  # the mapping ends with its last view


def _made(
    file: IO[bytes], bodies: Iterable[tuple[str, Mapping[str, Any]]], held_bytes: int
) -> list[tuple[str, bytes | slice, int | None]]:
    """(name, body or where in the file it lies, tokens that the answer has to have) of each."""
    made: list[tuple[str, bytes | slice, int | None]] = []
    at = 0
    for name, body in bodies:
        raw = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        asked = body.get("max_tokens") or body.get("max_completion_tokens")
        expected = asked if body.get("ignore_eos") and isinstance(asked, int) else None
        held_bytes -= len(raw)
        if held_bytes >= 0:
            made.append((name, raw, expected))
            continue
        file.write(raw)
        made.append((name, slice(at, at + len(raw)), expected))
        at += len(raw)
    file.flush()
    return made
