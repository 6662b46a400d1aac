"""Stages for measuring the proxy alone: encoders that count what they encode, P and D that answer at once.

An encoder takes its time, encodes a key that it is encoding already only once (as vLLM's encoder cache sees to), and
forgets it then, so that whatever still reaches it counts. It answers with the item's metadata and announces the feature
on a real socket, as the stages do. Nothing is computed.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import zmq.asyncio

from epd_serve import wire
from epd_serve.instances import Instance
from epd_serve.roles import Role

METADATA = {"image_grid_thw": [[1, 4, 4]]}
LIFE = "bench"


class FakeStages:
    """A transport for `proxy.app.create_app`: requests go to the stage that their host names (`http://E0`).

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
        self.transport = httpx.MockTransport(self._answer)

    def close(self) -> None:
        self._context.destroy(linger=0)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        name = request.url.host.upper()
        if name in self._publishers:
            keys = list(_keys(body))
            await asyncio.gather(*(self._encode(name, key) for key in keys))
            entries = {key: {"item_indices": [at], "metadata": METADATA} for at, key in enumerate(keys)}
            return httpx.Response(200, json={"object": "chat.completion", "choices": [], "ec_transfer_params": entries})
        message = {"role": "assistant", "content": f"from {name}"}
        return httpx.Response(200, json={"object": "chat.completion", "choices": [{"index": 0, "message": message}]})

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


def _keys(body: dict[str, Any]) -> Iterator[str]:
    """Keys of the items in a chat body, as the proxy names them for the stages."""
    for message in body["messages"]:
        content = message["content"]
        for part in content if isinstance(content, list) else []:
            if "uuid" in part:
                yield part["uuid"]
