"""Traffic as data: when requests came, how large they were and how long their answers. No content, no names of people.

The proxy writes it (`proxy/records/lines.py`), the load generator replays it, planner and simulator read it. The
file is JSON lines, one request each, in any order, since they are written as requests end; what is older is in a file
of that name with `.1`, where there is one. What is 0, empty or unknown is left out:

    {"id": "r1", "at_s": 0.0, "prompt_tokens": 423, "output_tokens": 64, "items": [{"tokens": 391, "width": 644}]}
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from epd_serve.errors import ConfigError

TORN = "Input data was truncated"
"""What msgspec says of half a line."""
Count = Annotated[int, Meta(ge=0)]


class Item(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A media item.

    Attributes:
        tokens: that it is in the prompt. width, height: in pixels, 0 where nobody knows.
        modality: `image`, `video` or `audio`.
        key: equal for equal items of one recording; "" where it came once. A hash with a key of its own: two recordings
            cannot be compared, and it says nothing of the item.
        tiles: of an image, that the encoder takes each by itself.
    """

    tokens: Count
    width: Count = 0
    height: Count = 0
    modality: str = "image"
    key: str = ""
    tiles: Annotated[int, Meta(ge=1)] = 1


class Request(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A request.

    Attributes:
        id: unique within the traffic.
        at_s: of its arrival, in seconds; of what is read, since the first one. In a recording, since the epoch.
        prompt_tokens: of text and items together. output_tokens: of its answer.
        items: in the prompt's order.
        session: equal for requests that go on with the same conversation; "" for one that stands alone.
        cached_tokens: of its prompt, that an earlier request of the session has in common with it.
        ttft_s, e2e_s: what its client waited for the first token of a stream, and for all; 0 where nobody knows.
    """

    id: str
    at_s: Annotated[float, Meta(ge=0)]
    prompt_tokens: Annotated[int, Meta(ge=1)]
    output_tokens: Annotated[int, Meta(ge=1)]
    items: tuple[Item, ...] = ()
    session: str = ""
    cached_tokens: Count = 0
    ttft_s: Annotated[float, Meta(ge=0)] = 0.0
    e2e_s: Annotated[float, Meta(ge=0)] = 0.0

    @property
    def item_tokens(self) -> int:
        return sum(item.tokens for item in self.items)

    @property
    def text_tokens(self) -> int:
        return max(0, self.prompt_tokens - self.item_tokens)


def read_traffic(path: Path) -> list[Request]:
    """The requests of a file, and of the older one beside it, in the order of their arrival, the first at 0. Half a
    line, of a writer that was killed or had no room, is left out.

    Raises:
        ConfigError: it cannot be read, is empty, or has a line that is no request; names file, line and field.
    """
    requests = _read(path)
    if (older := path.with_name(f"{path.name}.1")).exists():
        known = {one.id for one in requests}  # the file may have been turned over just now
        requests += [one for one in _read(older) if one.id not in known]
    if not requests:
        raise ConfigError(f"recorded traffic {path} holds no request", param="--workload")
    requests.sort(key=lambda one: one.at_s)
    first_s = requests[0].at_s
    return [replace(one, at_s=one.at_s - first_s) for one in requests]


def _read(path: Path) -> list[Request]:
    decode = msgspec.json.Decoder(Request).decode
    requests: list[Request] = []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"recorded traffic {path}: {error.strerror}", param="--workload") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            requests.append(decode(line))
        except msgspec.DecodeError as error:
            if number == len(lines) or str(error) == TORN:
                continue
            raise ConfigError(f"recorded traffic {path}:{number}: {error}", param="--workload") from None
    return requests


def write_traffic(path: Path, requests: Iterable[Request]) -> None:
    """Make or replace a file. Raises ConfigError: it cannot be written."""
    encode = msgspec.json.Encoder().encode
    try:
        path.write_bytes(b"".join(encode(one) + b"\n" for one in requests))
    except OSError as error:
        raise ConfigError(f"recorded traffic {path}: {error.strerror}", param="--workload") from error
