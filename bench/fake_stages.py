"""Stages for measuring the proxy alone: encoders that count what they encode, P and D that answer at once.

An encoder takes its time, encodes a key that it is encoding already only once (as vLLM's encoder cache sees to), and
forgets it then, so that whatever still reaches it counts. It answers with the item's metadata and announces the feature
on a real socket, as the stages do. Nothing is computed.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import zmq.asyncio
from yarl import URL

from epd_serve import wire
from epd_serve.instances import Instance
from epd_serve.roles import Role
from proxy.stages.client import Answer, Transport

METADATA = {"image_grid_thw": [[1, 4, 4]]}
LIFE = "bench"


class FakeStages:
    """What `transport` leads to, for `proxy.http.app.create_app`: requests go to the stage that their host names
    (`http://E0`).

    Args:
        encoders: how many. encode_s: time that one encode takes.
        events: directory for the encoders' sockets.

    Attributes:
        encoded: encodes by (encoder, key).
    """

    def __init__(self, encoders: int, *, encode_s: float, events: str) -> None:
        self.encoded: Counter[tuple[str, str]] = Counter()
        self._encode_s = encode_s
        self._under_way: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._context = zmq.asyncio.Context()
        self._publishers: dict[str, zmq.asyncio.Socket] = {}
        self.instances: list[Instance] = []
        for name in (f"E{number}" for number in range(encoders)):
            publisher = self._context.socket(zmq.PUB)
            publisher.setsockopt(zmq.LINGER, 0)
            publisher.bind(f"ipc://{events}/{name}")
            self._publishers[name] = publisher
            self.instances.append(Instance(name, Role.E, f"http://{name}", LIFE, events=f"ipc://{events}/{name}"))
        self.instances.append(Instance("P0", Role.P, "http://P0", LIFE, "ipc:///none"))
        self.instances.append(Instance("D0", Role.D, "http://D0", LIFE))

    def close(self) -> None:
        self._context.destroy(linger=0)

    def transport(self) -> Transport:
        """A way to these stages, for one proxy."""
        return _InProcess(self)

    async def answer(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        if name in self._publishers:
            keys = list(_keys(body))
            await asyncio.gather(*(self._encode(name, key) for key in keys))
            entries = {key: {"item_indices": [at], "metadata": METADATA} for at, key in enumerate(keys)}
            return {"object": "chat.completion", "choices": [], "ec_transfer_params": entries}
        message = {"role": "assistant", "content": f"from {name}"}
        return {"object": "chat.completion", "choices": [{"index": 0, "message": message}]}

    async def _encode(self, name: str, key: str) -> None:
        which = (name, key)
        if which not in self._under_way:
            self._under_way[which] = asyncio.create_task(self._compute(name, key))
        await asyncio.shield(self._under_way[which])

    async def _compute(self, name: str, key: str) -> None:
        self.encoded[name, key] += 1
        await asyncio.sleep(self._encode_s)
        event = wire.FeatureReady(key, 1, LIFE, host="bench", metadata=dict(METADATA))
        await self._publishers[name].send(wire.encode(event))
        del self._under_way[name, key]


class _InProcess:
    """`proxy.stages.client.Transport` without a network."""

    def __init__(self, stages: FakeStages) -> None:
        self._stages = stages

    async def post(self, url: URL, *, data: bytes, headers: Mapping[str, str], allow_redirects: bool) -> Answer:
        assert url.host is not None
        answer = await self._stages.answer(url.host.upper(), json.loads(data))
        return _Whole(json.dumps(answer).encode())

    async def close(self) -> None:
        pass


class _Whole:
    """An answer that is there already. `content` is itself, which is enough for answers that are no streams."""

    status = 200

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    @property
    def content(self) -> _Whole:
        return self

    async def read(self) -> bytes:
        return self._raw

    def at_eof(self) -> bool:
        return True

    async def readany(self) -> bytes:
        raw, self._raw = self._raw, b""
        return raw

    def close(self) -> None:
        pass


def _keys(body: dict[str, Any]) -> Iterator[str]:
    """Keys of the items in a chat body, as the proxy names them for the stages."""
    for message in body["messages"]:
        content = message["content"]
        for part in content if isinstance(content, list) else []:
            if "uuid" in part:
                yield part["uuid"]
