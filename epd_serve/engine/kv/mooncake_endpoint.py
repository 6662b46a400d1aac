"""Mooncake's Transfer Engine in one worker: one-sided writes between registered KV caches.

`P2PHANDSHAKE`, no daemon. Protocol `tcp` here, `ascend` and `rdma` by configuration of the same calls. Completion goes
over our own data channel (DONE follows the last write), because Mooncake's notifies do not work on every protocol.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from epd_serve.engine.kv.regions import Layers, Region
from epd_serve.engine.kv.transport import LinkError
from store.port_filter import reachable_only_at


class MooncakeEndpoint:
    """The Transfer Engine of one worker, with its KV regions registered. One per process.

    Raises:
        LinkError: Mooncake is not installed or cannot register the memory.
    """

    def __init__(self, layers: Layers, host: str, protocol: str) -> None:
        os.environ.setdefault("MC_TCP_BIND_ADDRESS", host)
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise LinkError(
                f"kv transport mooncake: {error}. Install the extra `mooncake` and the system package libibverbs1, "
                "or use --kv-transport shm on one host"
            ) from error
        self.engine: Any = TransferEngine()
        with reachable_only_at(host):  # it binds its ports to every address
            started = self.engine.initialize(host, "P2PHANDSHAKE", protocol, "")
        if started != 0:
            raise LinkError(f"Mooncake's Transfer Engine does not start on {host} with protocol {protocol}")
        self.session = f"{host}:{self.engine.get_rpc_port()}"
        self.bases = [region.data.data_ptr() for layer in layers for region in layer]
        for start, size in _spans([region for layer in layers for region in layer]):
            if self.engine.register_memory(start, size) != 0:
                raise LinkError(f"Mooncake cannot register {size} bytes of KV cache")


def _spans(regions: Sequence[Region]) -> list[tuple[int, int]]:
    """(address, bytes) of the memory to register: layers may be views of one storage, which registers once."""
    storages = {region.data.untyped_storage().data_ptr(): region.data.untyped_storage() for region in regions}
    return [(address, storage.nbytes()) for address, storage in storages.items()]
