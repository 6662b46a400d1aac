"""Mooncake's Transfer Engine in one worker: one-sided writes between registered KV caches.

`P2PHANDSHAKE`, no daemon. Protocol `tcp` here, `ascend` and `rdma` by configuration of the same calls. Completion goes
over our own data channel (DONE follows the last write), because Mooncake's notifies do not work on every protocol.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from epd_serve.engine.kv.regions import Layers
from epd_serve.engine.kv.spans import SpanError, extents_of, spans_of
from epd_serve.engine.kv.transport import LinkError
from npu_ops.memory import MAX_REGIONS, DeviceBlock, DeviceMemory
from store.addresses import authority, environment_at
from store.port_filter import reachable_only_at

_ENVIRONMENT = {
    "MC_LOG_LEVEL": "ERROR",
    # Slices that a peer may have waiting. With the default of 1024 each, one write of 200 MB fails, and so does every
    # write to that peer after it; after an idle gap a small one does (Mooncake #4209).
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
}


class MooncakeEndpoint:
    """The Transfer Engine of one worker, with its KV regions registered. One per process.

    Args:
        device: whose memory the KV cache is; the calling thread has set it.
        scratch: device memory that probes may read and write as long as the engine lives.
        engine_factory: makes the engine; by default Mooncake's.

    Attributes:
        session: what peers write to.
        bases: address of each region, in order of layers.
        scratch: address and bytes of registered memory that probes may read and write at any time.

    Raises:
        LinkError: Mooncake is not installed or cannot register the memory.
    """

    def __init__(
        self,
        layers: Layers,
        host: str,
        protocol: str,
        device: DeviceMemory,
        scratch: DeviceBlock,
        engine_factory: Callable[[], Any] | None = None,
    ) -> None:
        for name, value in {**_ENVIRONMENT, **environment_at(host)}.items():
            os.environ.setdefault(name, value)
        # Ascend's transport demands what the device names as its alignment; other protocols take any address.
        alignment = device.alignment if protocol == "ascend" else 1
        try:
            spans = spans_of(extents_of(layers), alignment, MAX_REGIONS - 1)
        except SpanError as error:
            raise LinkError(f"kv transport mooncake: {error}") from error
        self.engine: Any = (engine_factory or _mooncake)()
        with reachable_only_at(host):  # it binds its ports to every address
            started = self.engine.initialize(host, "P2PHANDSHAKE", protocol, "")
        if started != 0:
            raise LinkError(f"Mooncake's Transfer Engine does not start on {host} with protocol {protocol}")
        self.session = authority(host, self.engine.get_rpc_port())
        self.bases = [region.data.data_ptr() for layer in layers for region in layer]
        self._scratch = scratch  # kept: peers write to it
        self.scratch = (scratch.address, scratch.nbytes)
        for address, nbytes in [*spans, self.scratch]:
            if self.engine.register_memory(address, nbytes) != 0:
                raise LinkError(f"Mooncake cannot register {nbytes} bytes at {address:#x}")


def _mooncake() -> Any:
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise LinkError(
            f"kv transport mooncake: {error}. Install the extra `mooncake` and the system package libibverbs1, "
            "or use --kv-transport shm on one host"
        ) from error
    return TransferEngine()
